"""Callbacks for the Trainer."""
