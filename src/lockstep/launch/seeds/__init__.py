"""Several seeds: in one program where that can be, else a group of runs in processes of their own."""
