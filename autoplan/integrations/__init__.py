"""Programs inside other people's training loops; each module needs its own package installed."""
