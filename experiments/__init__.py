"""The tables and figures of the paper, one file each: claims, published numbers, runs, and the rules that judge claims.

python -m experiments --list --scale small           list the runs and their expected time
python -m experiments --scale small                  train and measure; finished runs are not repeated
python -m experiments --scale smoke --only relaxed   one experiment on synthetic images, in seconds
python -m experiments.results                        write docs/results.md from the JSON in experiments/results/
"""
