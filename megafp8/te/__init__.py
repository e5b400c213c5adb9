"""Everything that imports Transformer Engine: layers, recipes, fused operations, patches."""
