"""Data modules: what users subclass, and wrap for those that they have."""
