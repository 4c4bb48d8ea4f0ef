// What units_multiply.wgsl summed goes to `sums`. A barrier stands behind it.
#for i in 0..SG / T
#for j in 0..32 / T
  coopStore(sum${i}_${j}, &sums[${j * T * 64}u + subgroup * ${SG}u + ${i * T}u], 64u);
#end
#end
