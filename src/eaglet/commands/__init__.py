"""Commands that look at a run without computing it."""
