//! What kernel tests share: devices of each class, buffers, random data, tolerances.

use std::sync::{Arc, OnceLock};

use kvasir::gpu::{Buffer, BufferUse, Defines, Gpu, GpuError, GpuRequest, Kernel, Recording, Replayer};
use kvasir::kernels::{Class, ParamArena};

use crate::support::require_gpu;

/// A device with everything a test needs.
pub struct Rig {
    pub name: &'static str,
    pub gpu: Gpu,
    pub class: Class,
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
            match Gpu::open(&GpuRequest { backend: None, adapter: None, floor, checked_shaders }) {
                Ok(gpu) => rigs.push(Rig { name, class: Class::of(gpu.caps()), gpu }),
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

    /// A storage buffer of `len` words, each `fill`: poison that must not show in results.
    pub fn filled(&self, label: &str, len: usize, fill: f32) -> Buffer {
        self.upload(label, &vec![fill; len])
    }

    pub fn params<T: bytemuck::Pod>(&self, value: &T) -> kvasir::gpu::BufferSlice {
        ParamArena::new().push(&self.gpu, value).expect("memory for parameters")
    }

    /// Runs one kernel once.
    pub fn run(&self, kernel: &Arc<Kernel>, bindings: &[(&str, &kvasir::gpu::BufferSlice)], workgroups: u32) {
        let bound = self.gpu.bind(kernel, bindings).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        let mut recording = Recording::new("test");
        recording.dispatch("test", &bound, workgroups);
        self.replay(&recording);
    }

    pub fn replay(&self, recording: &Recording) {
        let mut replayer = Replayer::new(&self.gpu);
        let ticket = replayer.submit(&self.gpu, recording, &[]).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        replayer.wait(&self.gpu, ticket).unwrap_or_else(|e| panic!("{}: {e}", self.name));
    }

    pub fn read<T: bytemuck::Pod>(&self, buffer: &Buffer) -> Vec<T> {
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
