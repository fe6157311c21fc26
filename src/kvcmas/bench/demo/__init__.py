"""The demo: a team of agents reads one report, with and without sharing, turn by turn.

settings.py   what can be chosen
texts.py      the team, the report and the earlier texts that come with the package
replay.py     any continuation judged on KV as a request left it
paired.py     an engine that answers each prompt twice: with sharing, and exactly
run.py        learn on earlier texts, then the rounds
results.py    what came out, as plain data; summary.py: in one line
watch.py      what a view is told; plain.py, live.py, bars.py: the views
table.py, plot.py
"""
