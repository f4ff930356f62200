"""What a program needs on chips that are not there: `animegamer plan`."""
