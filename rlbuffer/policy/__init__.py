"""Pure decisions of the batcher: age, groups, budgets, selection, closing, composing, admission. No I/O, clock or randomness."""
