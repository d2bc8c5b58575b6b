"""Cutting in the trainers people use; each module needs its own framework: `pip install batchsplit[trainers]`."""
