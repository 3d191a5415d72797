"""Other libraries' calls, answered by ours: `compat.asp`, `compat.torchao_sparsity` (docs/migration.md)."""
