"""Training data: reads text, tokenises it and divides it into sequences of one length.

The sequences of a batch depend only on the position in the run. The package knows no
model and no process group, except for the checks of data sets of other libraries (`split_rows`,
`StreamPart`).
"""
