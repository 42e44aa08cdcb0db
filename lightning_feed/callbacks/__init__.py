"""Callbacks: what users put into the Trainer, and watch_loader for loops of their own."""
