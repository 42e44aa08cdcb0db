"""Measuring: is the GPU waiting, and for what?"""
