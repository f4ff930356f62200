"""Video files, storyboards, and motion by optical flow."""
