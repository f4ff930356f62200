"""A vision-language model as a judge of games."""
