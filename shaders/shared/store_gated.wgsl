// The end of matmul_i8.wgsl with GATED: a workgroup has 32 rows of gate, then the 32 rows of up that belong to them.
#for c in 0..C
  if first_token + ${c}u < m {
    let n = first_row / 2u + own0 % 32u;
    let at = (first_token + ${c}u) * params.y_stride + params.y_offset + n;
#ifdef ADDED
    let is_changed = lora_changes_gate_or_up(first_token + ${c}u);
    let added_from = (first_token + ${c}u) * params.added_stride + params.added_offset + first_row;
#for r in 0..R
    let shift${r} = bias${r} + select(0.0, added[added_from + min(own${r}, params.n - 1u - first_row)], is_changed);
#end
#else
#for r in 0..R
    let shift${r} = bias${r};
#end
#endif
#if SG == 64
    let mine = acc0_${c} + shift0;
    let v0 = gated(mine, subgroupShuffleXor(mine, 32u));
#else
#for p in 0..P
    let v${p} = gated(acc${p}_${c} + shift${p}, acc${p + P}_${c} + shift${p + P});
#end
#endif
#if P == 4
    let v = Own(v0, v1, v2, v3);
#endif
#if P == 2
    let v = Own(v0, v1);
#endif
#if P == 1
    let v = v0;
#endif
    store_group(at, v, lane, first_row < params.n && own0 < 32u);
  }
#end
