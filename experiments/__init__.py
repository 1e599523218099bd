"""The paper's tables and figures, one file each: a claim, its published numbers, the runs it needs, and a rule.

python -m experiments --list --scale small           what would run, and for how long
python -m experiments --scale small                  run it; what is done already is not run again
python -m experiments --scale smoke --only relaxed   one of them, on synthetic images, in seconds
python -m experiments.results                        docs/results.md, from the JSON in experiments/results/
"""
