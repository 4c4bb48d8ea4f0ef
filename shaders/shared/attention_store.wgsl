// The end of attention.wgsl's subgroup entry point: totals of NQ queries to the output, quantised (I8) or not.
#for n in 0..NQ
  if ${n / HEADS}u < tile.count {
    let token_${n} = work_${n / HEADS}.x;
    let head = tile.part * ${HEADS}u + ${n % HEADS}u;
#ifdef SINKS
    let inverse = share_beside_sink(total_m_${n}, total_l_${n}, head);
#else
    let inverse = 1.0 / total_l_${n};
#endif
#for c in 0..CPL
    {
      let is_mine = lane + ${c * SG}u < ${DP / DPL}u;
#for i in 0..DPL / 4
      let out_${i} = total_${n}_${c}_${i} * inverse;
#end
#ifdef I8
      // A group of 32 lies in 32 / DPL neighbouring lanes.
      let abs_0 = abs(out_0);
      var largest = max(max(abs_0.x, abs_0.y), max(abs_0.z, abs_0.w));
#if DPL == 8
      let abs_1 = abs(out_1);
      largest = max(largest, max(max(abs_1.x, abs_1.y), max(abs_1.z, abs_1.w)));
#endif
      largest = max(largest, subgroupShuffleXor(largest, 1u));
      largest = max(largest, subgroupShuffleXor(largest, 2u));
#if DPL == 4
      largest = max(largest, subgroupShuffleXor(largest, 4u));
#endif
      let to_q = select(0.0, 127.0 / largest, largest > 1.2e-38);
      let q_0 = vec4<i32>(round(out_0 * to_q));
      var sum = q_0.x + q_0.y + q_0.z + q_0.w;
#if DPL == 8
      let q_1 = vec4<i32>(round(out_1 * to_q));
      sum += q_1.x + q_1.y + q_1.z + q_1.w;
#endif
      sum += subgroupShuffleXor(sum, 1u);
      sum += subgroupShuffleXor(sum, 2u);
#if DPL == 4
      sum += subgroupShuffleXor(sum, 4u);
#endif
      let scale = largest / 127.0;
      let to = token_${n} * params.out_stride + head * ${D}u + chunk_${c} * ${DPL}u;
      if is_mine {
#if DPL == 8
        yq[to / 8u] = vec2(pack4xI8(q_0), pack4xI8(q_1));
#else
        yq[to / 4u] = pack4xI8(q_0);
#endif
        if to % 32u == 0u {
          ys[to / 32u] = vec2(scale, scale * f32(sum));
        }
      }
#else
      let to = token_${n} * params.out_stride + head * ${D}u + chunk_${c} * ${DPL}u;
#for e in 0..DPL
      if is_mine && chunk_${c} * ${DPL}u + ${e}u < ${D}u {
        y[to + ${e}u] = out_${e / 4}[${e % 4}];
      }
#end
#endif
    }
#end
#ifndef I8
    if head + 1u == params.num_heads {
      for (var pad = params.num_heads * ${D}u + lane; pad < params.out_stride; pad += ${SG}u) {
        y[token_${n} * params.out_stride + pad] = 0.0;
      }
    }
#endif
  }
#end
