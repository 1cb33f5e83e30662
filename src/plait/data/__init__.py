"""Training data: reads text, tokenises it and cuts it into sequences of one length.

A loader chooses the sequences of a batch from the position in the run alone. The package knows no
model and no process group, except for the checks of data sets of other libraries (`split_rows`,
`stream_part`).
"""
