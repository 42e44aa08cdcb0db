"""What limits training, and what to change: a pure function of what was measured."""
