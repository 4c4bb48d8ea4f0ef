// A pass: the tiles of units.wgsl are multiplied and added to the matrices sum0_0, …. A barrier stands before it and after it.
#for k in 0..32 / T
#for i in 0..SG / T
    let left${i}_${k} = coopLoadT<Left>(&w_tile[(subgroup * ${SG}u + ${i * T}u) * PITCH + ${k * T}u], PITCH);
#end
#for j in 0..32 / T
    let right${j}_${k} = coopLoad<Right>(&x_tile[${j * T}u * PITCH + ${k * T}u], PITCH);
#for i in 0..SG / T
    sum${i}_${j} = coopMultiplyAdd(left${i}_${k}, right${j}_${k}, sum${i}_${j});
#end
#end
#end
