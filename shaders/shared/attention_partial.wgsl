// In attention.wgsl's subgroup entry point, after a range: the partial results of NQ queries, where the item is a partial one.
    if tile.is_partial {
#for n in 0..NQ
      if ${n / HEADS}u < tile.count {
        let to = partial_at(work_${n / HEADS}.y + range, tile.part * ${HEADS}u + ${n % HEADS}u);
#for c in 0..CPL
        if lane + ${c * SG}u < ${DP / DPL}u {
#for i in 0..DPL / 4
          partials[to + chunk_${c} * ${DPL / 4}u + ${i}u] = o_${n}_${c}_${i};
#end
        }
#end
        if lane == 0u {
          partials[to + ${DP / 4}u] = vec4(m_${n}, l_${n}, 0.0, 0.0);
        }
      }
#end
      continue;
    }
