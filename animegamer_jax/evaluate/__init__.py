"""`animegamer evaluate`: plays a benchmark, scores every turn, writes a report.

evaluation          one evaluation from its options to the report (read first); command, options
sources             the systems that the options name
play_games          plays and scores games; reference_scores: upper bounds and baselines
worlds              the worlds that can draw and classify their own clips, by name
results             `results.json`, which the report is made of
benchmarks/, metrics/, judge/, report/
"""
