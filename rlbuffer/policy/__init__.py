"""Pure decisions of the batcher: age, groups, budgets, selection, closing, admission. No I/O, clock or randomness."""
