"""Training data: text is read, tokenised and divided into sequences of one length.

The sequences of a batch depend only on the position in the run. The package uses no model and no
process group, except for `split_rows`, which compares the rows of a user's data set between ranks.
"""
