"""What was found, as text for people and as files for programs."""
