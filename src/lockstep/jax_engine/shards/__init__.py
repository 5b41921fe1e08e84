"""Building blocks for computing shard by shard: keys, blocks, permutations, packed columns, normalisers."""
