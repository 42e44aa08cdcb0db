"""Reports: a verdict as text and pages for people, and as JSON for programs."""
