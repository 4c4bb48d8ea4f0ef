// The end of matmul_i8.wgsl with TO_HIDDEN: sums are added to the hidden state y; gain * y goes out quantised, with the
// sums of squares of y.
#for c in 0..C
  if first_token + ${c}u < m {
    let out_row = (first_token + ${c}u) * params.y_stride;
#for j in 0..R / P
    {
      // Lanes beyond n hold padding, which is zero, up to the end of a group; further groups are not stored.
      let n = first_row + own${j * P};
      let at = out_row + params.y_offset + n;
      let stores = params.y_offset + n < params.y_stride;
#for p in 0..P
      var v${p} = 0.0;
      var g${p} = 0.0;
      if n + ${p}u < params.n {
        v${p} = y[at + ${p}u] + acc${j * P + p}_${c};
        y[at + ${p}u] = v${p};
        g${p} = gain[n + ${p}u];
      }
#end
#if P == 4
      let v = Own(v0, v1, v2, v3);
      let weighted = v * Own(g0, g1, g2, g3);
#endif
#if P == 2
      let v = Own(v0, v1);
      let weighted = v * Own(g0, g1);
#endif
#if P == 1
      let v = v0;
      let weighted = v * g0;
#endif
      let squares = group_add(squares_own(v));
      store_group(at, weighted, lane, stores);
      if stores && at % 32u == 0u {
        ys[params.to_squares_at + at / 32u] = vec2(squares, 0.0);
      }
    }
#end
  }
#end
