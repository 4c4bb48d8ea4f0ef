//! Opening an adapter, and the faults that it reports later.
//!
//! Each [`Gpu`] has its own instance, device and queue; only one thread should wait on it. Optional features are used
//! when present (subgroups of one fixed size, timestamps); a `floor` request asks for none of them and for WebGPU's
//! default limits, so that the code for the weakest adapter can be run anywhere.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use super::compiler::{CacheFile, Compiler, Maker};
use super::error::GpuError;
use super::pipeline::Kernel;
use super::probe;
use super::shader::Defines;
use super::texels::TEXEL_LANES;

/// Which API to go through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuBackend {
    Vulkan,
    Metal,
    Dx12,
    /// Runs nothing: pipelines and encoders can be built on any machine.
    Noop,
}

impl GpuBackend {
    fn bits(self) -> wgpu::Backends {
        match self {
            GpuBackend::Vulkan => wgpu::Backends::VULKAN,
            GpuBackend::Metal => wgpu::Backends::METAL,
            GpuBackend::Dx12 => wgpu::Backends::DX12,
            GpuBackend::Noop => wgpu::Backends::NOOP,
        }
    }

    /// The backend named on a command line.
    pub fn parse(name: &str) -> Option<GpuBackend> {
        match name.to_ascii_lowercase().as_str() {
            "vulkan" => Some(GpuBackend::Vulkan),
            "metal" => Some(GpuBackend::Metal),
            "dx12" => Some(GpuBackend::Dx12),
            "noop" => Some(GpuBackend::Noop),
            _ => None,
        }
    }
}

/// What to open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuRequest {
    /// `None` tries Vulkan, Metal and DX12.
    pub backend: Option<GpuBackend>,
    /// Part of the adapter's name, in any case. `None` prefers discrete, then integrated, virtual, software.
    pub adapter: Option<String>,
    /// Use no optional feature and only WebGPU's default limits.
    pub floor: bool,
    /// Keep wgpu's bounds, loop and division checks in every shader.
    pub checked_shaders: bool,
    /// Open it for cooperative matrices; an adapter that has none, or whose are wrong, is refused.
    pub matrix_units: bool,
}

/// What the opened device can do, as far as kernels care.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuCaps {
    pub name: String,
    pub backend: String,
    pub driver: String,
    /// PCI ids, or what the backend has in their place.
    pub vendor: u32,
    pub device: u32,
    /// The adapter is software on the CPU.
    pub is_cpu: bool,
    /// Lanes of a subgroup, when subgroups can be used, have one size only, and were found to be as reported.
    pub subgroup_size: Option<u32>,
    /// Side of the cooperative matrices that the adapter reports, 16 or 8: of f16, with sums in f32, and such that rows of
    /// them fill a subgroup. They are used only where [`GpuRequest::matrix_units`] asked for them.
    pub matrix_side: Option<u32>,
    pub has_timestamps: bool,
    pub max_binding_bytes: u64,
    pub max_buffer_bytes: u64,
    /// Storage buffers that a kernel may bind.
    pub max_storage_buffers: u32,
    /// Alignment of a slice within a buffer, for any use.
    pub slice_align: u64,
    /// Loads of texels are much faster than those from buffers; see [`super::texels`].
    pub prefers_texels: bool,
}

/// An adapter as `doctor` shows it.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterReport {
    pub name: String,
    pub backend: String,
    pub driver: String,
    /// `discrete`, `integrated`, `virtual`, `software` or `other`.
    pub device_type: &'static str,
    /// Smallest and largest subgroup.
    pub subgroup_sizes: (u32, u32),
    /// Names of the optional features that are used or could be.
    pub features: Vec<&'static str>,
    /// Names and values of the limits that matter.
    pub limits: Vec<(&'static str, u64)>,
}

/// Errors that arrive outside a call: kept until someone asks.
#[derive(Debug, Default)]
pub(super) struct Faults {
    first: OnceLock<GpuError>,
}

impl Faults {
    fn set(&self, error: GpuError) {
        // Only the first fault tells the cause; what follows is its echo.
        let _ = self.first.set(error);
    }

    fn check(&self) -> Result<(), GpuError> {
        self.first.get().map_or(Ok(()), |error| Err(error.clone()))
    }
}

/// An open device.
pub struct Gpu {
    pub(super) device: wgpu::Device,
    pub(super) queue: wgpu::Queue,
    pub(super) caps: GpuCaps,
    has_matrix_units: bool,
    pub(super) checked_shaders: bool,
    pub(super) faults: Arc<Faults>,
    pub(super) allocated_bytes: Arc<AtomicU64>,
    /// Held while submitting and while waiting: wgpu 30 asserts that no submit happens during a wait.
    pub(super) turn: Mutex<()>,
    pub(super) kernels: Mutex<HashMap<(String, Defines), Arc<Kernel>>>,
    pub(super) compiler: Compiler,
    /// Where the driver's pipelines are kept between runs, if they are.
    kept: Mutex<Option<(CacheFile, wgpu::PipelineCache)>>,
    dump_dir: Option<std::path::PathBuf>,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu").field("caps", &self.caps).finish_non_exhaustive()
    }
}

const NO_ADAPTER: &str = "No graphics adapter was found. Install a Vulkan driver: on Debian and Ubuntu the packages \
                          `libvulkan1` and `mesa-vulkan-drivers` hold one for most cards and a software one for any machine";

impl Gpu {
    /// Opens the best adapter that fits the request.
    pub fn open(request: &GpuRequest) -> Result<Gpu, GpuError> {
        Gpu::open_limited(request, u64::MAX)
    }

    /// As [`Gpu::open`], with storage bindings of at most so many bytes, as smaller adapters have them.
    pub fn open_limited(request: &GpuRequest, max_binding_bytes: u64) -> Result<Gpu, GpuError> {
        let mut adapters = enumerate(request.backend);
        if adapters.is_empty() {
            return Err(GpuError::NoAdapter(NO_ADAPTER.into()));
        }
        adapters.sort_by_key(|a| type_rank(a.get_info().device_type));
        let adapter = match &request.adapter {
            None => &adapters[0],
            Some(wanted) => named(&adapters, wanted)?,
        };
        let mut gpu = open_device(adapter, request, max_binding_bytes)?;
        if let Some(size) = gpu.caps.subgroup_size
            && !probe::subgroups_are(&gpu, size)?
        {
            tracing::warn!("{} reports subgroups of {size} lanes, but does not run them: not used", gpu.caps.name);
            gpu.caps.subgroup_size = None;
            gpu.caps.prefers_texels = false;
        }
        if request.matrix_units {
            gpu.try_matrix_units()?;
        }
        Ok(gpu)
    }

    /// Side of the cooperative matrices by which kernels multiply: 16 or 8, where the device was opened for them.
    pub fn matrix_units(&self) -> Option<u32> {
        self.caps.matrix_side.filter(|_| self.has_matrix_units)
    }

    /// Refuses matrices that do not give what the CPU does.
    fn try_matrix_units(&mut self) -> Result<(), GpuError> {
        let refused = |fault: String| Err(GpuError::NoMatrixUnits(format!("{} {fault}", self.caps.name)));
        let (Some(side), Some(lanes)) = (self.caps.matrix_side, self.caps.subgroup_size) else {
            return refused(
                "has no cooperative matrices that kernels can use (16 x 16 or 8 x 8 of f16 with sums in f32, and subgroups \
                 of one size that they fill)"
                    .into(),
            );
        };
        if !probe::matrix_units_multiply(self, side, lanes)? {
            return refused(format!("gets a trial product by cooperative matrices of {side} x {side} wrong"));
        }
        self.has_matrix_units = true;
        Ok(())
    }

    /// Every adapter of the backends that can run kernels; empty when there is none.
    pub fn adapters() -> Vec<AdapterReport> {
        let mut adapters = enumerate(None);
        adapters.sort_by_key(|a| type_rank(a.get_info().device_type));
        adapters.iter().map(report).collect()
    }

    /// Keeps what the driver compiles in a file in `dir`, where it can tell what it compiled, and uses what an earlier run
    /// left there. Call it before the first kernel is asked for, and [`Gpu::save_pipelines`] after the last.
    pub fn keep_pipelines(&self, dir: &std::path::Path) {
        if self.device.features().contains(wgpu::Features::PIPELINE_CACHE) {
            let device = format!("{} {} {}", self.caps.backend, self.caps.name, self.caps.driver);
            let name = format!("{:032x}", xxhash_rust::xxh3::xxh3_128(device.as_bytes()));
            *self.kept() = Some(CacheFile::open(&self.device, dir, &name));
        }
    }

    /// Writes what the driver compiled since [`Gpu::keep_pipelines`]. A failure is logged: it costs time only.
    pub fn save_pipelines(&self) {
        if let Some((file, cache)) = &mut *self.kept() {
            file.save(cache);
        }
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, Option<(CacheFile, wgpu::PipelineCache)>> {
        self.kept.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub(super) fn maker(&self) -> Maker {
        let cache = self.kept().as_ref().map(|(_, cache)| cache.clone());
        Maker { device: self.device.clone(), faults: self.faults.clone(), checked_shaders: self.checked_shaders, cache }
    }

    /// Also writes each kernel's stitched WGSL to this folder when it is compiled.
    pub fn dump_shaders(&mut self, dir: std::path::PathBuf) {
        self.dump_dir = Some(dir);
    }

    pub(super) fn dump_dir(&self) -> Option<&std::path::Path> {
        self.dump_dir.as_deref()
    }

    pub fn caps(&self) -> &GpuCaps {
        &self.caps
    }

    /// Bytes of all live buffers.
    pub fn allocated_bytes(&self) -> u64 {
        self.allocated_bytes.load(Ordering::Relaxed)
    }

    /// The first fault that was reported outside a call: a lost device, or an error that no scope caught.
    pub fn check(&self) -> Result<(), GpuError> {
        self.faults.check()
    }

    /// Waits for the thread that submits or waits at the moment; see [`Gpu::turn`].
    pub(super) fn take_turn(&self) -> std::sync::MutexGuard<'_, ()> {
        // The lock guards no data that a panic could have left half done.
        self.turn.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Runs `work` and gives back what wgpu reported of it.
    pub(super) fn scoped<T>(&self, what: &str, bytes: u64, work: impl FnOnce() -> T) -> Result<T, GpuError> {
        scoped((&self.device, &self.faults), what, bytes, work)
    }
}

/// As [`Gpu::scoped`], from any thread.
pub(super) fn scoped<T>(
    (device, faults): (&wgpu::Device, &Faults),
    what: &str,
    bytes: u64,
    work: impl FnOnce() -> T,
) -> Result<T, GpuError> {
    faults.check()?;
    let internal = device.push_error_scope(wgpu::ErrorFilter::Internal);
    let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
    let validation = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let value = work();
    // On native the futures are ready at once.
    let errors =
        [pollster::block_on(validation.pop()), pollster::block_on(memory.pop()), pollster::block_on(internal.pop())];
    match errors.into_iter().flatten().next() {
        None => faults.check().map(|()| value),
        Some(wgpu::Error::OutOfMemory { source }) => {
            Err(GpuError::OutOfMemory { what: what.into(), bytes, reason: source.to_string() })
        }
        Some(other) => Err(GpuError::validation(what, other.to_string())),
    }
}

fn enumerate(backend: Option<GpuBackend>) -> Vec<wgpu::Adapter> {
    // GL is left out: it has no compute on many machines, and Vulkan covers the rest.
    let all = wgpu::Backends::VULKAN | wgpu::Backends::METAL | wgpu::Backends::DX12;
    let backends = backend.map_or(all, GpuBackend::bits);
    let mut desc = wgpu::InstanceDescriptor::new_without_display_handle();
    desc.backends = backends;
    desc.flags = wgpu::InstanceFlags::empty();
    desc.backend_options.noop.enable = backend == Some(GpuBackend::Noop);
    // Refuse an allocation rather than let the driver push the desktop into swap.
    desc.memory_budget_thresholds.for_resource_creation = Some(97);
    let instance = wgpu::Instance::new(desc);
    pollster::block_on(instance.enumerate_adapters(backends))
}

fn type_rank(device_type: wgpu::DeviceType) -> u32 {
    match device_type {
        wgpu::DeviceType::DiscreteGpu => 0,
        wgpu::DeviceType::IntegratedGpu => 1,
        wgpu::DeviceType::VirtualGpu => 2,
        wgpu::DeviceType::Other => 3,
        wgpu::DeviceType::Cpu => 4,
    }
}

fn type_name(device_type: wgpu::DeviceType) -> &'static str {
    match device_type {
        wgpu::DeviceType::DiscreteGpu => "discrete",
        wgpu::DeviceType::IntegratedGpu => "integrated",
        wgpu::DeviceType::VirtualGpu => "virtual",
        wgpu::DeviceType::Other => "other",
        wgpu::DeviceType::Cpu => "software",
    }
}

fn named<'a>(adapters: &'a [wgpu::Adapter], wanted: &str) -> Result<&'a wgpu::Adapter, GpuError> {
    let wanted_lower = wanted.to_lowercase();
    let found = adapters.iter().find(|a| a.get_info().name.to_lowercase().contains(&wanted_lower));
    found.ok_or_else(|| {
        let names: Vec<String> = adapters.iter().map(|a| format!("`{}`", a.get_info().name)).collect();
        GpuError::NoSuchAdapter(format!("No adapter's name contains `{wanted}`; there are {}", names.join(", ")))
    })
}

/// The one size of a subgroup, if kernels may count on it.
fn fixed_subgroup_size(adapter: &wgpu::Adapter) -> Option<u32> {
    let info = adapter.get_info();
    let one_size = info.subgroup_min_size == info.subgroup_max_size && (4..=64).contains(&info.subgroup_min_size);
    (one_size && adapter.features().contains(wgpu::Features::SUBGROUP)).then_some(info.subgroup_min_size)
}

/// What shaders with cooperative matrices of f16 need.
const MATRIX_FEATURES: wgpu::Features =
    wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX.union(wgpu::Features::SHADER_F16);

fn matrix_side(adapter: &wgpu::Adapter) -> Option<u32> {
    use wgpu::CooperativeScalarType::{F16, F32};
    if !adapter.features().contains(MATRIX_FEATURES) {
        return None;
    }
    let lanes = fixed_subgroup_size(adapter)?;
    // Lavapipe of Mesa 26.2.6 reports matrices at any width, and has no device for them or crashes unless lanes are as many.
    let is_cpu = adapter.get_info().device_type == wgpu::DeviceType::Cpu;
    let fits = |side: u32| if is_cpu { lanes == side } else { lanes.is_multiple_of(side) };
    let all = adapter.cooperative_matrix_properties();
    let has = |side: u32| {
        all.iter().any(|p| [p.m_size, p.n_size, p.k_size] == [side; 3] && p.ab_type == F16 && p.cr_type == F32)
    };
    [16, 8].into_iter().find(|&side| fits(side) && has(side))
}

/// WebGPU's defaults, lowered where an adapter has less of something that no kernel needs (textures, say).
fn floor_limits(adapter: &wgpu::Limits) -> wgpu::Limits {
    wgpu::Limits::defaults().or_worse_values_from(adapter)
}

fn wanted_limits(adapter: &wgpu::Limits) -> wgpu::Limits {
    let mut limits = floor_limits(adapter);
    limits.max_buffer_size = adapter.max_buffer_size;
    limits.max_storage_buffer_binding_size = adapter.max_storage_buffer_binding_size;
    limits.max_storage_buffers_per_shader_stage = adapter.max_storage_buffers_per_shader_stage.min(16);
    limits.max_compute_workgroup_storage_size = adapter.max_compute_workgroup_storage_size.min(32 << 10);
    limits.max_compute_invocations_per_workgroup = adapter.max_compute_invocations_per_workgroup.min(1024);
    limits.max_compute_workgroup_size_x = adapter.max_compute_workgroup_size_x.min(1024);
    limits
}

fn open_device(adapter: &wgpu::Adapter, request: &GpuRequest, max_binding_bytes: u64) -> Result<Gpu, GpuError> {
    let subgroup_size = fixed_subgroup_size(adapter).filter(|_| !request.floor);
    let has_timestamps = !request.floor && adapter.features().contains(wgpu::Features::TIMESTAMP_QUERY);
    let mut features = wgpu::Features::empty();
    features.set(wgpu::Features::SUBGROUP, subgroup_size.is_some());
    features.set(wgpu::Features::TIMESTAMP_QUERY, has_timestamps);
    features.set(
        wgpu::Features::PIPELINE_CACHE,
        !request.floor && adapter.features().contains(wgpu::Features::PIPELINE_CACHE),
    );
    let matrix_side = matrix_side(adapter).filter(|_| !request.floor);
    let takes_matrices = request.matrix_units && matrix_side.is_some();
    features.set(MATRIX_FEATURES, takes_matrices);
    let mut limits = if request.floor { floor_limits(&adapter.limits()) } else { wanted_limits(&adapter.limits()) };
    limits.max_storage_buffer_binding_size = limits.max_storage_buffer_binding_size.min(max_binding_bytes);
    let info = adapter.get_info();
    let caps = GpuCaps {
        name: info.name.clone(),
        backend: info.backend.to_string(),
        driver: format!("{} {}", info.driver, info.driver_info).trim().to_string(),
        vendor: info.vendor,
        device: info.device,
        is_cpu: info.device_type == wgpu::DeviceType::Cpu,
        subgroup_size,
        matrix_side,
        has_timestamps,
        max_binding_bytes: limits.max_storage_buffer_binding_size,
        max_buffer_bytes: limits.max_buffer_size,
        max_storage_buffers: limits.max_storage_buffers_per_shader_stage,
        slice_align: u64::from(
            limits.min_storage_buffer_offset_alignment.max(limits.min_uniform_buffer_offset_alignment),
        ),
        prefers_texels: info.device_type == wgpu::DeviceType::Cpu
            && subgroup_size.is_some_and(|lanes| lanes <= TEXEL_LANES),
    };
    let (device, queue) = pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor {
        label: Some("kvasir engine"),
        required_features: features,
        required_limits: limits,
        experimental_features: match takes_matrices {
            // SAFETY: cooperative matrices are the one such feature that is asked for; the only kernels with them are ours,
            // load and store within their arrays of workgroup memory, and are tried out before they are used.
            true => unsafe { wgpu::ExperimentalFeatures::enabled() },
            false => wgpu::ExperimentalFeatures::disabled(),
        },
        memory_hints: wgpu::MemoryHints::MemoryUsage,
        trace: wgpu::Trace::Off,
    }))
    .map_err(|e| GpuError::NoDevice(format!("{}: {e}", info.name)))?;

    let faults = Arc::new(Faults::default());
    let on_lost = faults.clone();
    device.set_device_lost_callback(move |reason, message| {
        on_lost.set(GpuError::Lost(format!("{reason:?} {message}").trim().to_string()));
    });
    let on_error = faults.clone();
    device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| on_error.set(uncaptured(error))));
    Ok(Gpu {
        device,
        queue,
        caps,
        has_matrix_units: false,
        checked_shaders: request.checked_shaders,
        faults,
        allocated_bytes: Arc::default(),
        turn: Mutex::default(),
        kernels: Mutex::default(),
        compiler: Compiler::default(),
        kept: Mutex::default(),
        dump_dir: None,
    })
}

fn uncaptured(error: wgpu::Error) -> GpuError {
    match error {
        wgpu::Error::OutOfMemory { source } => {
            GpuError::OutOfMemory { what: "a submitted command".into(), bytes: 0, reason: source.to_string() }
        }
        other => GpuError::validation("a submitted command", other.to_string()),
    }
}

fn report(adapter: &wgpu::Adapter) -> AdapterReport {
    let info = adapter.get_info();
    let limits = adapter.limits();
    let features = adapter.features();
    let named_features = [
        ("subgroup", wgpu::Features::SUBGROUP),
        ("shader-f16", wgpu::Features::SHADER_F16),
        ("timestamp-query", wgpu::Features::TIMESTAMP_QUERY),
        ("pipeline-cache", wgpu::Features::PIPELINE_CACHE),
        ("cooperative-matrix", wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX),
        ("mappable-primary-buffers", wgpu::Features::MAPPABLE_PRIMARY_BUFFERS),
    ];
    AdapterReport {
        name: info.name.clone(),
        backend: info.backend.to_string(),
        driver: format!("{} {}", info.driver, info.driver_info).trim().to_string(),
        device_type: type_name(info.device_type),
        subgroup_sizes: (info.subgroup_min_size, info.subgroup_max_size),
        features: named_features.iter().filter(|(_, f)| features.contains(*f)).map(|(name, _)| *name).collect(),
        limits: vec![
            ("max buffer bytes", limits.max_buffer_size),
            ("max storage binding bytes", limits.max_storage_buffer_binding_size),
            ("max storage buffers per shader", u64::from(limits.max_storage_buffers_per_shader_stage)),
            ("max workgroup memory bytes", u64::from(limits.max_compute_workgroup_storage_size)),
            ("max workgroup invocations", u64::from(limits.max_compute_invocations_per_workgroup)),
            ("max workgroups per dimension", u64::from(limits.max_compute_workgroups_per_dimension)),
        ],
    }
}
