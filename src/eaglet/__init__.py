"""eaglet raises an EAGLE-3 drafter from prompts: reproducible, audited, nothing computed twice."""
