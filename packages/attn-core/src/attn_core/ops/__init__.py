"""Operations on caches and partial results, one function each."""
