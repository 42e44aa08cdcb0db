"""Callbacks for the Trainer, and watch_loader for other training loops."""
