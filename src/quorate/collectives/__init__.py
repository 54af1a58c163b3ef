"""The lane ring at work: links carry chunks, the schedule says which, and every worker ends with the same sum."""
