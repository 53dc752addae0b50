"""What look.py --prepare answers about settings, rows, rewards, tools and environments.

Each answer is a function (script, given) -> plain values, and calls what the training calls. given["settings"] are the
form's texts, {flag: text}. bench.py runs them.
"""
