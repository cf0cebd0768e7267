"""What happens to one row of scores, compiled: a step is a function on one row and knows no other row.

So a row's result cannot depend on what is beside it. `deciding`, `scoring` and `likely` run the steps over a batch;
`batch` fills the records that they read.
"""
