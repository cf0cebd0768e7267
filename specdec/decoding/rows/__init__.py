"""What happens to one row of scores, compiled: a step is a function on one row and knows no other row.

So a row's result cannot depend on what is beside it. `kernel` runs the steps over a batch, `batch` fills its records.
"""
