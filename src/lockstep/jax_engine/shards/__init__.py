"""Building blocks of what is computed shard by shard: keys, blocks, permutations, packed columns, normalisers."""
