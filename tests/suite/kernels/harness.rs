//! What kernel tests share: devices of each class, buffers, random data, tolerances.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use kvasir::batch::StepBatch;
use kvasir::gpu::Uploader;
use kvasir::gpu::{Buffer, BufferSlice, BufferUse, Defines, Gpu, GpuError, GpuRequest, Kernel, Recording, Replayer};
use kvasir::kernels::attention_work::AttentionWork;
use kvasir::kernels::kv_layout::KvLayout;
use kvasir::kernels::{Choices, Class, KernelContext, PackedMatrix, ParamArena, QuantisedRows, step_meta};
use kvasir::model::dtype::DType;

use crate::support::require_gpu;

/// A device with everything a test needs.
pub struct Rig {
    pub name: &'static str,
    pub gpu: Gpu,
    pub class: Class,
    /// Only one thread waits on a device at a time.
    waiting: Mutex<()>,
}

/// Every way to open the machine's best adapter: with and without optional features, with and without shader checks.
/// Empty, with a line printed, where there is no adapter; with `REQUIRE_GPU=1` that is a failure.
pub fn rigs() -> &'static [Rig] {
    static RIGS: OnceLock<Vec<Rig>> = OnceLock::new();
    RIGS.get_or_init(|| {
        let kinds = [
            ("trusted", false, false),
            ("checked", false, true),
            ("floor trusted", true, false),
            ("floor checked", true, true),
        ];
        let mut rigs = Vec::new();
        for (name, floor, checked_shaders) in kinds {
            match Gpu::open(&GpuRequest { backend: None, adapter: None, floor, checked_shaders, matrix_units: false }) {
                Ok(gpu) => rigs.push(Rig::new(name, gpu)),
                Err(GpuError::NoAdapter(message)) if !require_gpu() => {
                    println!("skipped: {message}");
                    return Vec::new();
                }
                Err(error) => panic!("{name}: {error}"),
            }
        }
        rigs
    })
}

impl Rig {
    pub fn new(name: &'static str, gpu: Gpu) -> Rig {
        Rig { name, class: Class::of(gpu.caps()), gpu, waiting: Mutex::new(()) }
    }

    pub fn kernel(&self, name: &str, defines: &Defines) -> Arc<Kernel> {
        self.gpu.kernel(name, defines).unwrap_or_else(|e| panic!("{}: {e}", self.name))
    }

    /// A storage buffer that holds `words`.
    pub fn upload<T: bytemuck::Pod>(&self, label: &str, words: &[T]) -> Buffer {
        let bytes: &[u8] = bytemuck::cast_slice(words);
        let buffer = self.gpu.alloc(label, bytes.len() as u64, BufferUse::Storage).expect("memory for a test");
        self.gpu.write(&buffer.whole(), bytes);
        buffer
    }

    /// Keys or values in memory of the kind that the executor takes.
    pub fn cache(&self, label: &str, layout: &KvLayout, values: &[f32]) -> Buffer {
        let buffer = layout.alloc(&self.gpu, label).expect("memory for a test");
        self.gpu.write(&buffer.whole(), &layout.encode(values));
        buffer
    }

    /// A storage buffer of `len` words, each `fill`: poison that must not show in results.
    pub fn filled(&self, label: &str, len: usize, fill: f32) -> Buffer {
        self.upload(label, &vec![fill; len])
    }

    pub fn params<T: bytemuck::Pod>(&self, value: &T) -> BufferSlice {
        ParamArena::new().push(&self.gpu, value).expect("memory for parameters")
    }

    /// Runs one kernel once.
    pub fn run(&self, kernel: &Arc<Kernel>, bindings: &[(&str, &BufferSlice)], workgroups: u32) {
        let bound = self.gpu.bind(kernel, bindings).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        let mut recording = Recording::new("test");
        recording.dispatch("test", &bound, workgroups);
        self.replay(&recording);
    }

    /// A metadata buffer for batches of up to `max_words` words; see [`Rig::set_step`].
    pub fn step_meta(&self, max_words: usize) -> Buffer {
        self.upload("step_meta", &vec![0u32; max_words])
    }

    pub fn set_step(&self, step_meta: &Buffer, batch: &StepBatch) {
        self.set_work(step_meta, batch, &AttentionWork::default());
    }

    pub fn set_work(&self, step_meta: &Buffer, batch: &StepBatch, work: &AttentionWork) {
        let mut words = Vec::new();
        step_meta::encode(batch, work, &mut words);
        self.gpu.write(&step_meta.whole(), bytemuck::cast_slice(&words));
    }

    /// Calls `build` with a context, as a model's loader does.
    pub fn build<T>(
        &self,
        step_meta: &Buffer,
        multiply_pairs: bool,
        build: impl FnOnce(&mut KernelContext<'_>) -> Result<T, GpuError>,
    ) -> T {
        let step_meta = step_meta.whole();
        let (mut params, mut choices) = (ParamArena::new(), Choices::default());
        let mut ctx = KernelContext {
            gpu: &self.gpu,
            class: self.class,
            params: &mut params,
            choices: &mut choices,
            step_meta: &step_meta,
            multiply_pairs,
            matrix_units: self.gpu.matrix_units(),
        };
        build(&mut ctx).unwrap_or_else(|e| panic!("{}: {e}", self.name))
    }

    pub fn weights(&self, dtype: DType, k: usize, bytes: &[u8]) -> PackedMatrix {
        let mut uploader = Uploader::new(&self.gpu);
        let matrix = PackedMatrix::upload(&self.gpu, &mut uploader, "weights", dtype, k as u32, &[bytes]);
        matrix.unwrap_or_else(|e| panic!("{}: {e}", self.name))
    }

    /// Buffers for quantised rows, poisoned.
    pub fn quantised_rows(&self, rows: usize, stride: usize) -> (QuantisedRows, Buffer, Buffer) {
        let q = self.upload("xq", &vec![0x7f7f_7f7fu32; rows * stride / 4]);
        let scales = self.filled("xs", rows * stride / 16, f32::NAN);
        (QuantisedRows { q: q.whole(), scales: scales.whole() }, q, scales)
    }

    pub fn replay(&self, recording: &Recording) {
        let _turn = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let mut replayer = Replayer::new(&self.gpu);
        let ticket = replayer.submit(&self.gpu, recording, &[]).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        replayer.wait(&self.gpu, ticket).unwrap_or_else(|e| panic!("{}: {e}", self.name));
    }

    pub fn read<T: bytemuck::Pod>(&self, buffer: &Buffer) -> Vec<T> {
        let _turn = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = self.gpu.read(&buffer.whole()).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        bytemuck::pod_collect_to_vec(&bytes)
    }
}

/// Small deterministic random numbers (splitmix64).
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in -1..1.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub fn below(&mut self, n: u32) -> u32 {
        (self.bits() % u64::from(n)) as u32
    }

    pub fn vector(&mut self, len: usize, scale: f32) -> Vec<f32> {
        (0..len).map(|_| self.unit() * scale).collect()
    }
}

/// Largest difference over the largest magnitude of `want`.
pub fn relative_error(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let scale = want.iter().fold(0f32, |m, v| m.max(v.abs())).max(1e-30);
    got.iter().zip(want).fold(0f32, |m, (g, w)| if g.is_nan() { f32::INFINITY } else { m.max((g - w).abs()) }) / scale
}

#[track_caller]
pub fn assert_close(got: &[f32], want: &[f32], tolerance: f32, what: &str) {
    let error = relative_error(got, want);
    assert!(error <= tolerance, "{what}: error {error:e} of the largest value, tolerance {tolerance:e}");
}

/// A batch of `num_tokens` one-token rows with nothing in it, whose first `num_logits` tokens want logits.
pub fn plain_batch(num_tokens: u32, num_logits: u32) -> StepBatch {
    StepBatch {
        block_size: 16,
        input_ids: vec![0; num_tokens as usize],
        positions: vec![0; num_tokens as usize],
        kv_slots: vec![0; num_tokens as usize],
        row_of_token: (0..num_tokens).collect(),
        row_start: (0..=num_tokens).collect(),
        slot_of_row: (0..num_tokens).collect(),
        logit_tokens: (0..num_logits).collect(),
        ..StepBatch::default()
    }
}

/// A random matrix as a file stores it: small floats, or random integers with scales of either sign around 0.01.
pub fn random_weights(dtype: DType, n: usize, k: usize, random: &mut Random) -> Vec<u8> {
    let elements = n * k;
    match dtype {
        DType::F32 => return bytemuck::cast_slice(&random.vector(elements, 0.1)).to_vec(),
        DType::F16 => {
            return random.vector(elements, 0.1).iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect();
        }
        DType::BF16 => {
            return random.vector(elements, 0.1).iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect();
        }
        _ => {}
    }
    let scale_fields: &[usize] = match dtype {
        DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
        DType::Q6_K => &[208],
        DType::Q2_K => &[80, 82],
        DType::Q3_K => &[108],
        DType::TQ1_0 => &[52],
        DType::TQ2_0 => &[64],
        DType::IQ1_M | DType::MXFP4 | DType::NVFP4 | DType::Int4(_) | DType::Int8(_) | DType::Float8(_) => &[],
        _ => &[0],
    };
    let mut bytes: Vec<u8> = (0..dtype.bytes(elements as u64).unwrap()).map(|_| random.bits() as u8).collect();
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        for &field in scale_fields {
            let scale =
                half::f16::from_f32(0.01 * (1.5 + random.unit()) * if random.unit() < 0.0 { -1.0 } else { 1.0 });
            block[field..field + 2].copy_from_slice(&scale.to_le_bytes());
        }
        match dtype {
            DType::MXFP4 => block[0] = 120 + block[0] % 4,
            DType::NVFP4 => block[..4].iter_mut().for_each(|e| *e = 16 + *e % 16),
            // 2^-10 with some mantissa, split over the tops of four shorts.
            DType::IQ1_M => {
                for (i, nibble) in [random.bits() as u8 & 15, 4, 4, 1].into_iter().enumerate() {
                    block[49 + 2 * i] = block[49 + 2 * i] & 15 | nibble << 4;
                }
            }
            DType::Int4(_) | DType::Int8(_) | DType::Float8(_) => {
                block[..4].copy_from_slice(&(0.01 * (1.5 + random.unit())).to_le_bytes());
                block[4..8].copy_from_slice(&(0.01 * random.unit()).to_le_bytes());
                if let DType::Float8(_) = dtype {
                    block[8..].iter_mut().filter(|b| **b & 127 == 127).for_each(|b| *b = 0);
                }
            }
            _ => {}
        }
    }
    bytes
}

use kvasir::kernels::variants::WEIGHT_TYPES;

/// Types to try on a rig: all on the first, with checks and without the optional features one of each layout that the
/// others do not have.
pub fn weight_types(rig: &Rig) -> Vec<DType> {
    use kvasir::model::dtype::Span;
    let is_rare = |dtype: &DType| match dtype {
        DType::IQ1_S | DType::IQ2_XS | DType::IQ2_S | DType::Q1_0 | DType::TQ1_0 | DType::TQ2_0 => true,
        DType::IQ3_S | DType::IQ4_NL | DType::NVFP4 => true,
        DType::Int4(span) => *span != Span::Four,
        DType::Int8(span) => *span != Span::Two,
        DType::Float8(span) => *span != Span::One,
        _ => false,
    };
    WEIGHT_TYPES.into_iter().filter(|dtype| rig.name == "trusted" || !is_rare(dtype)).collect()
}

/// Rows of `k` elements, each padded with zeros to `stride`.
pub fn padded(rows: &[f32], k: usize, stride: usize) -> Vec<f32> {
    rows.chunks_exact(k).flat_map(|row| row.iter().copied().chain(std::iter::repeat_n(0.0, stride - k))).collect()
}

/// Tolerances, as parts of the largest magnitude of the result.
pub mod tolerance {
    /// Sums of up to a few thousand f32 products in another order.
    pub const SUM: f32 = 1e-5;
    /// Sums of products of f16.
    pub const HALF: f32 = 2e-3;
    /// A few f32 operations.
    pub const ELEMENT: f32 = 1e-6;
}
