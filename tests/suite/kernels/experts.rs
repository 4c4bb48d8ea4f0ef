//! Mixtures of experts: routing, products in which each row has its own expert, and their sum.

use std::borrow::Cow;

use kvasir::gpu::{Recording, Uploader};
use kvasir::kernels::combine::{self, Combine};
use kvasir::kernels::expert_matmul::{ExpertMatmul, Rows};
use kvasir::kernels::expert_pairs::{ExpertPairs, Layout};
use kvasir::kernels::matmul;
use kvasir::kernels::route::{self, Route};
use kvasir::kernels::weights::{ExpertMatrix, ExpertShape, WeightError};
use kvasir::kernels::{Activations, quantise, stride};
use kvasir::model::dtype::DType;
use kvasir::model::experts::{ExpertSpec, Routing, Scoring};
use kvasir::model::quant::dequantize;

use super::harness::{Random, Rig, assert_close, padded, plain_batch, random_weights, rigs, tolerance};

fn spec(num_experts: u32, num_active: u32, routing: Routing) -> ExpertSpec {
    ExpertSpec {
        num_experts,
        num_active,
        intermediate_size: 32,
        routing,
        shared_size: 0,
        has_shared_gate: false,
        dense_layers: Vec::new(),
        router_bias: false,
        expert_bias: false,
    }
}

#[test]
fn tokens_find_the_experts_and_shares_of_the_reference() {
    let plain = Routing { is_normalised: false, scale: 1.5, ..Routing::SOFTMAX };
    let sigmoid = Routing { scoring: Scoring::Sigmoid, has_selection_bias: true, ..Routing::SOFTMAX };
    let by_two = Routing { num_groups: 8, num_active_groups: 4, group_by_two: true, ..sigmoid };
    let cases = [
        spec(6, 2, Routing::SOFTMAX),
        spec(128, 8, Routing::SOFTMAX),
        spec(60, 4, plain),
        spec(160, 6, Routing { num_groups: 8, num_active_groups: 3, ..plain }),
        spec(64, 6, sigmoid),
        spec(256, 8, by_two),
    ];
    for rig in rigs() {
        for spec in &cases {
            let (n, tokens, width) = (spec.num_experts as usize, 5, stride(spec.num_experts + 1) as usize);
            let mut random = Random(n as u64);
            let mut logits = random.vector(tokens * n, 4.0);
            // Equal ones: the lower index comes first.
            logits[3] = logits[1];
            let bias = random.vector(n, 0.3);
            let bias = spec.routing.has_selection_bias.then_some(bias.as_slice());
            let want: Vec<(u32, f32)> =
                logits.chunks_exact(n).flat_map(|row| route::reference(spec, row, bias)).collect();
            let logits = rig.upload("logits", &padded(&logits, n, width));
            let bias = bias.map(|bias| rig.upload("bias", bias).whole());
            let (chosen, shares) = (rig.filled("chosen", want.len(), 0.5), rig.filled("shares", want.len(), 0.5));
            let step_meta = rig.step_meta(1024);
            let (chosen_all, shares_all, logits) = (chosen.whole(), shares.whole(), logits.whole());
            let buffers = route::Buffers {
                logits: &logits,
                selection_bias: bias.as_ref(),
                chosen: &chosen_all,
                shares: &shares_all,
            };
            let kernel = rig.build(&step_meta, false, |ctx| Route::new(ctx, spec, width as u32, &buffers));
            rig.set_step(&step_meta, &plain_batch(tokens as u32, 0));
            let mut recording = Recording::new("route");
            kernel.record(&mut recording, tokens as u32);
            rig.replay(&recording);
            let what = format!("{} {spec:?}", rig.name);
            assert_eq!(rig.read::<u32>(&chosen), want.iter().map(|w| w.0).collect::<Vec<u32>>(), "{what}");
            let want: Vec<f32> = want.iter().map(|w| w.1).collect();
            assert_close(&rig.read::<f32>(&shares), &want, 8.0 * tolerance::ELEMENT, &what);
        }
    }
}

const TOKENS: usize = 17;
const ACTIVE: usize = 2;
const EXPERTS: usize = 5;
const POISON: f32 = 12345.0;

/// A product of five experts on one device.
struct Case<'a> {
    rig: &'a Rig,
    dtype: DType,
    n: usize,
    k: usize,
    is_i8: bool,
    /// 1 where every pair has a row of its own.
    pairs_per_row: usize,
    max_plane_bytes: u64,
}

impl Case<'_> {
    fn name(&self) -> String {
        let Case { rig, dtype, n, k, is_i8, pairs_per_row, .. } = self;
        format!("{} {dtype} {n}x{k} i8 {is_i8} {pairs_per_row} pairs to a row", rig.name)
    }

    fn upload(&self, bytes: &[u8]) -> ExpertMatrix {
        let shape = ExpertShape {
            label: "experts",
            dtype: self.dtype,
            num_experts: EXPERTS as u32,
            n: self.n as u32,
            k: self.k as u32,
            max_plane_bytes: self.max_plane_bytes,
        };
        let size = bytes.len() / EXPERTS;
        // In two parts, as gate and up are.
        let row = size / self.n;
        let rows_of = |e: u32| -> Result<Vec<Cow<'_, [u8]>>, WeightError> {
            let (first, second) = bytes[e as usize * size..][..size].split_at(3 * row);
            Ok(vec![Cow::Borrowed(first), Cow::Borrowed(second)])
        };
        ExpertMatrix::upload(&self.rig.gpu, &mut Uploader::new(&self.rig.gpu), shape, rows_of)
            .unwrap_or_else(|e| panic!("{}: {e}", self.name()))
    }

    /// Runs several token counts; results must be near the reference and equal between counts.
    fn check(&self) {
        let rig = self.rig;
        let mut random = Random(self.n as u64 * 31 + self.k as u64);
        let bytes = random_weights(self.dtype, EXPERTS * self.n, self.k, &mut random);
        let mut w = vec![0f32; EXPERTS * self.n * self.k];
        dequantize(self.dtype, &bytes, &mut w).unwrap();
        let weights = self.upload(&bytes);
        let (num_pairs, x_stride) = (TOKENS * ACTIVE, stride(self.k as u32) as usize);
        let x = padded(&random.vector(num_pairs / self.pairs_per_row * self.k, 2.0), self.k, x_stride);
        let bias = random.vector(EXPERTS * self.n, 0.5);
        // Expert 3 gets nothing, expert 1 much.
        let chosen: Vec<u32> = (0..num_pairs).map(|_| [0, 1, 1, 1, 2, 4][random.below(6) as usize]).collect();
        let (q, scales): (Vec<Vec<i8>>, Vec<[f32; 2]>) = x.chunks_exact(32).map(quantise::reference).unzip();
        let x_used: Vec<f32> = match self.is_i8 {
            true => q.iter().zip(&scales).flat_map(|(q, s)| q.iter().map(|q| f32::from(*q) * s[0])).collect(),
            false => x.clone(),
        };
        let want: Vec<f32> = (0..num_pairs)
            .flat_map(|pair| {
                let e = chosen[pair] as usize;
                let row = &x_used[pair / self.pairs_per_row * x_stride..][..self.k];
                let y = matmul::reference(&w[e * self.n * self.k..][..self.n * self.k], row, self.k);
                y.into_iter().zip(&bias[e * self.n..]).map(|(y, b)| y + b).collect::<Vec<f32>>()
            })
            .collect();
        let (x_rows, i8_rows) = (rig.upload("x", &x).whole(), rig.quantised_rows(x.len() / x_stride, x_stride).0);
        rig.gpu.write(&i8_rows.q, bytemuck::cast_slice(&q.concat()));
        rig.gpu.write(&i8_rows.scales, bytemuck::cast_slice(&scales));
        let activations = if self.is_i8 { Activations::I8(&i8_rows) } else { Activations::F32(&x_rows) };
        let mut first: Vec<f32> = Vec::new();
        for tokens in [TOKENS, 1, 4, 11] {
            let got = self.run(&weights, activations, &chosen, &bias, tokens);
            assert_close(&got, &want[..got.len()], tolerance::SUM, &self.name());
            let is_same = first.iter().zip(&got).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(is_same, "{}: {tokens} tokens give other bits than {TOKENS}", self.name());
            first = if first.is_empty() { got } else { first };
        }
    }

    /// y `[tokens * active, n]`
    fn run(&self, weights: &ExpertMatrix, x: Activations<'_>, chosen: &[u32], bias: &[f32], tokens: usize) -> Vec<f32> {
        let rig = self.rig;
        let (offset, y_stride) = (3, self.n + 5);
        let layout = Layout { num_experts: EXPERTS as u32, num_active: ACTIVE as u32, max_tokens: TOKENS as u32 };
        let y = rig.filled("y", TOKENS * ACTIVE * y_stride, POISON);
        let (chosen, bias) = (rig.upload("chosen", chosen).whole(), rig.upload("bias", bias).whole());
        let work = rig.filled("work", layout.bytes() as usize / 4, f32::NAN).whole();
        let step_meta = rig.step_meta(1024);
        let y_all = y.whole();
        let rows = Rows {
            layout,
            work: &work,
            pairs_per_row: self.pairs_per_row as u32,
            x_stride: None,
            y: &y_all,
            y_stride: y_stride as u32,
            y_offset: offset as u32,
        };
        let pairs = rig.build(&step_meta, false, |ctx| ExpertPairs::new(ctx, layout, &chosen, &work));
        let product = rig.build(&step_meta, false, |ctx| ExpertMatmul::new(ctx, weights, x, rows, Some(&bias)));
        rig.set_step(&step_meta, &plain_batch(tokens as u32, 0));
        let mut recording = Recording::new("experts");
        pairs.record(&mut recording, tokens as u32);
        product.record(&mut recording, tokens as u32);
        rig.replay(&recording);
        let all: Vec<f32> = rig.read(&y);
        for (i, value) in all.iter().enumerate() {
            let inside = i / y_stride < tokens * ACTIVE && (offset..offset + self.n).contains(&(i % y_stride));
            assert!(inside || *value == POISON, "{}: wrote outside at {i}", self.name());
        }
        (0..tokens * ACTIVE).flat_map(|pair| all[pair * y_stride + offset..][..self.n].to_vec()).collect()
    }
}

#[test]
fn products_of_experts_match_the_reference_and_do_not_depend_on_other_tokens() {
    for rig in rigs() {
        for (dtype, n, k, is_i8) in [
            (DType::F32, 70, 88, false),
            (DType::F16, 24, 32, false),
            (DType::Q8_0, 130, 96, false),
            (DType::Q4_0, 64, 64, true),
            (DType::Q6_K, 70, 256, true),
            (DType::MXFP4, 70, 64, false),
        ] {
            let case = Case { rig, dtype, n, k, is_i8, pairs_per_row: ACTIVE, max_plane_bytes: 1 << 27 };
            case.check();
            Case { pairs_per_row: 1, ..case }.check();
        }
    }
}

#[test]
fn experts_that_are_cut_into_bindings_join_without_a_seam() {
    for rig in rigs() {
        // A block of 64 rows has 6144 bytes: slices of two blocks, where an expert has three.
        let case =
            Case { rig, dtype: DType::Q8_0, n: 150, k: 96, is_i8: false, pairs_per_row: 1, max_plane_bytes: 12500 };
        let mut random = Random(1);
        let matrix = case.upload(&random_weights(DType::Q8_0, EXPERTS * 150, 96, &mut random));
        let rows: Vec<(u32, u32)> = matrix.slices.iter().map(|s| (s.first_row, s.num_rows)).collect();
        assert_eq!((rows.len(), rows[1], rows[7]), (8, (128, 128), (896, 64)));
        case.check();
    }
}

#[test]
fn parts_of_experts_join_the_hidden_state_by_their_shares() {
    for rig in rigs() {
        for (has_shared, has_mix) in [(false, false), (true, false), (true, true)] {
            let (n, active, tokens) = (96usize, 3usize, 4usize);
            let mut random = Random(7);
            let (y, shares) = (random.vector(tokens * n, 1.0), random.vector(tokens * active, 1.0));
            let (parts, shared) = (random.vector(tokens * active * n, 1.0), random.vector(tokens * n, 1.0));
            let logits = random.vector(tokens * 8, 3.0);
            let want: Vec<f32> = (0..tokens)
                .flat_map(|t| {
                    let mix = if has_mix { 1.0 / (1.0 + f64::from(-logits[t * 8 + 5]).exp()) } else { 1.0 };
                    let shared = has_shared.then_some((&shared[t * n..][..n], mix));
                    let (shares, parts) = (&shares[t * active..][..active], &parts[t * active * n..][..active * n]);
                    let sum = combine::reference(shares, parts, shared, 0.5);
                    sum.into_iter().zip(&y[t * n..]).map(|(s, y)| s + y).collect::<Vec<f32>>()
                })
                .collect();
            let [y, shares, parts, shared, logits] =
                [&y, &shares, &parts, &shared, &logits].map(|v| rig.upload("v", v));
            let step_meta = rig.step_meta(256);
            let params = combine::Params {
                num_active: active as u32,
                stride: n as u32,
                scale: 0.5,
                logits_stride: 8,
                mix_at: 5,
            };
            let kernel = rig.build(&step_meta, false, |ctx| {
                let (shares, parts, y) = (shares.whole(), parts.whole(), y.whole());
                let (shared, logits) = (shared.whole(), logits.whole());
                let buffers = combine::Buffers {
                    shares: &shares,
                    parts: &parts,
                    shared: has_shared.then_some(&shared),
                    mix_logits: has_mix.then_some(&logits),
                    y: &y,
                };
                Combine::new(ctx, params, &buffers)
            });
            rig.set_step(&step_meta, &plain_batch(tokens as u32, 0));
            let mut recording = Recording::new("combine");
            kernel.record(&mut recording, tokens as u32);
            rig.replay(&recording);
            let what = format!("{} shared {has_shared} mix {has_mix}", rig.name);
            assert_close(&rig.read::<f32>(&y), &want, 4.0 * tolerance::ELEMENT, &what);
        }
    }
}
