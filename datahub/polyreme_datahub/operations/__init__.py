"""Operations: each is a function of bytes in one file, whose results are reused by its action's key."""
