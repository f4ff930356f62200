"""From a film to two-second clips: cuts, fades, letterbox, filters."""
