"""Who does what in a clip: labels by a vision-language model or by people."""
