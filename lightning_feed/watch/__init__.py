"""Station 5 of the road: is the GPU waiting, and for whom?"""
