//! Kernels: stitched, reflected, compiled once per set of defines; and kernels with their buffers bound.
//!
//! All bindings of a kernel are in group 0. Shader modules are trusted (no bounds, loop or division checks) unless the
//! device was opened with `checked_shaders`; workgroup memory is not zeroed, so kernels write before they read.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::buffer::BufferSlice;
use super::device::Gpu;
use super::error::GpuError;
use super::shader::{Defines, ShaderError, Stitched, stitch};

/// How a kernel uses a binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BindingKind {
    Uniform,
    ReadOnly,
    /// A read-only storage texture.
    Texels(wgpu::TextureFormat),
    /// A line of texels that is only written.
    WrittenTexels(wgpu::TextureFormat),
    ReadWrite,
}

/// A binding as the shader declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BindingInfo {
    pub name: String,
    pub index: u32,
    pub kind: BindingKind,
    /// Bytes of the declared type; of one element for a runtime-sized array.
    pub min_bytes: u64,
}

/// What naga sees of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reflection {
    pub bindings: Vec<BindingInfo>, // by index
    pub workgroup_size: [u32; 3],
    /// Bytes of `var<workgroup>` declarations.
    pub workgroup_bytes: u64,
}

/// A compiled kernel.
#[derive(Debug)]
pub struct Kernel {
    pub name: String,
    pub defines: Defines,
    pub reflection: Reflection,
    pub(super) pipeline: wgpu::ComputePipeline,
    layout: wgpu::BindGroupLayout,
}

/// A kernel with its buffers: what a dispatch needs besides a grid. Made at load, reused every step.
pub struct Bound {
    pub kernel: Arc<Kernel>,
    pub slices: Vec<BufferSlice>, // in order of the kernel's bindings
    pub(super) group: wgpu::BindGroup,
}

impl std::fmt::Debug for Bound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}[{}](", self.kernel.name, self.kernel.defines)?;
        for (i, (info, slice)) in self.kernel.reflection.bindings.iter().zip(&self.slices).enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            write!(f, "{comma}{}: {}@{}+{}", info.name, slice.buffer.label(), slice.offset, slice.size)?;
        }
        f.write_str(")")
    }
}

/// Bindings, workgroup size and workgroup memory of a parsed kernel.
pub fn reflect(stitched: &Stitched, module: &naga::Module) -> Result<Reflection, ShaderError> {
    let fault = |message: String| stitched.error_at(1, message);
    let [entry] = module.entry_points.as_slice() else {
        return Err(fault(format!("expected one entry point, found {}", module.entry_points.len())));
    };
    let mut layouter = naga::proc::Layouter::default();
    layouter.update(module.to_ctx()).map_err(|e| fault(e.to_string()))?;
    let mut bindings = Vec::new();
    let mut workgroup_bytes = 0;
    for (_, global) in module.global_variables.iter() {
        let min_bytes = u64::from(layouter[global.ty].size);
        if global.space == naga::AddressSpace::WorkGroup {
            workgroup_bytes += min_bytes;
        }
        let Some(binding) = &global.binding else { continue };
        let name = global.name.clone().unwrap_or_default();
        let kind = match global.space {
            naga::AddressSpace::Uniform => BindingKind::Uniform,
            naga::AddressSpace::Storage { access } if access.contains(naga::StorageAccess::STORE) => {
                BindingKind::ReadWrite
            }
            naga::AddressSpace::Storage { .. } => BindingKind::ReadOnly,
            naga::AddressSpace::Handle => texel_kind(&module.types[global.ty].inner).ok_or_else(|| {
                fault(format!("binding `{name}` is no texture of unsigned texels that is only read or only written"))
            })?,
            other => return Err(fault(format!("binding `{name}` lies in {other:?}"))),
        };
        if binding.group != 0 {
            return Err(fault(format!("binding `{name}` is not in group 0")));
        }
        bindings.push(BindingInfo { name, index: binding.binding, kind, min_bytes });
    }
    bindings.sort_by_key(|b| b.index);
    Ok(Reflection { bindings, workgroup_size: entry.workgroup_size, workgroup_bytes })
}

/// Storage textures of unsigned words, read or written.
fn texel_kind(ty: &naga::TypeInner) -> Option<BindingKind> {
    let naga::TypeInner::Image { dim: naga::ImageDimension::D2, arrayed: false, class } = ty else { return None };
    let naga::ImageClass::Storage { format, access } = class else { return None };
    let format = match format {
        naga::StorageFormat::R32Uint => wgpu::TextureFormat::R32Uint,
        naga::StorageFormat::Rg32Uint => wgpu::TextureFormat::Rg32Uint,
        naga::StorageFormat::Rgba32Uint => wgpu::TextureFormat::Rgba32Uint,
        _ => return None,
    };
    match *access {
        naga::StorageAccess::LOAD => Some(BindingKind::Texels(format)),
        naga::StorageAccess::STORE => Some(BindingKind::WrittenTexels(format)),
        _ => None,
    }
}

impl Gpu {
    /// The kernel of this file and these defines, compiled at the first call.
    pub fn kernel(&self, name: &str, defines: &Defines) -> Result<Arc<Kernel>, GpuError> {
        let key = (name.to_string(), defines.clone());
        if let Some(kernel) = self.kernels.lock().expect("no panic while locked").get(&key) {
            return Ok(kernel.clone());
        }
        let kernel = Arc::new(self.compile(&stitch(name, defines)?, defines)?);
        let mut kernels = self.kernels.lock().expect("no panic while locked");
        Ok(kernels.entry(key).or_insert(kernel).clone())
    }

    /// Compiles a list on all cores, so that later calls of [`Gpu::kernel`] find them. Calls `progress` with the number
    /// done, from several threads.
    pub fn compile_all(&self, list: &[(String, Defines)], progress: &(dyn Fn(usize) + Sync)) -> Result<(), GpuError> {
        let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let worker = || -> Result<(), GpuError> {
            while let Some((name, defines)) = list.get(next.fetch_add(1, Ordering::Relaxed)) {
                self.kernel(name, defines)?;
                progress(done.fetch_add(1, Ordering::Relaxed) + 1);
            }
            Ok(())
        };
        let num_threads = std::thread::available_parallelism().map_or(1, usize::from).min(list.len());
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..num_threads).map(|_| scope.spawn(worker)).collect();
            threads.into_iter().try_for_each(|t| {
                t.join().unwrap_or_else(|_| Err(GpuError::validation("compile", "a compiler thread panicked")))
            })
        })
    }

    /// Compiles a stitched text that is not in the cache.
    pub fn compile(&self, stitched: &Stitched, defines: &Defines) -> Result<Kernel, GpuError> {
        let what = format!("kernel {} [{defines}]", stitched.name);
        if let Some(dir) = self.dump_dir() {
            let file = dir.join(format!("{} {defines}.wgsl", stitched.name).replace(' ', "-").replace('=', ""));
            std::fs::write(&file, &stitched.text)
                .map_err(|e| GpuError::validation(&what, format!("cannot write {}: {e}", file.display())))?;
        }
        let reflection = reflect(stitched, &stitched.parse()?)?;
        let (pipeline, layout) = self.scoped(&what, 0, || self.build_pipeline(&what, stitched, &reflection))?;
        Ok(Kernel { name: stitched.name.clone(), defines: defines.clone(), reflection, pipeline, layout })
    }

    fn build_pipeline(
        &self,
        label: &str,
        stitched: &Stitched,
        reflection: &Reflection,
    ) -> (wgpu::ComputePipeline, wgpu::BindGroupLayout) {
        let source = wgpu::ShaderSource::Wgsl(stitched.text.as_str().into());
        let desc = wgpu::ShaderModuleDescriptor { label: Some(label), source };
        let module = if self.checked_shaders {
            self.device.create_shader_module(desc)
        } else {
            // SAFETY: all shader text is ours, embedded in the program; every kernel is tested with checks on over edge
            // shapes, guards its indices against the parameters it is given, and has no unbounded loop.
            unsafe { self.device.create_shader_module_trusted(desc, wgpu::ShaderRuntimeChecks::unchecked()) }
        };
        let entries: Vec<wgpu::BindGroupLayoutEntry> = reflection.bindings.iter().map(layout_entry).collect();
        let layout = self
            .device
            .create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: Some(label), entries: &entries });
        let pipeline_layout = self.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some(label),
            bind_group_layouts: &[Some(&layout)],
            immediate_size: 0,
        });
        let pipeline = self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(label),
            layout: Some(&pipeline_layout),
            module: &module,
            entry_point: None,
            compilation_options: wgpu::PipelineCompilationOptions {
                constants: &[],
                zero_initialize_workgroup_memory: false,
            },
            cache: None,
        });
        (pipeline, layout)
    }

    /// Binds slices by the names that the kernel declares; all of them, each once.
    pub fn bind(&self, kernel: &Arc<Kernel>, bindings: &[(&str, &BufferSlice)]) -> Result<Arc<Bound>, GpuError> {
        let what = || format!("bindings of kernel {} [{}]", kernel.name, kernel.defines);
        let infos = &kernel.reflection.bindings;
        if let Some((name, _)) = bindings.iter().find(|(name, _)| !infos.iter().any(|i| i.name == *name)) {
            return Err(GpuError::validation(what(), format!("the kernel has no binding `{name}`")));
        }
        let mut slices = Vec::with_capacity(infos.len());
        for info in infos {
            let mut given = bindings.iter().filter(|(name, _)| *name == info.name);
            let (Some((_, slice)), None) = (given.next(), given.next()) else {
                return Err(GpuError::validation(what(), format!("binding `{}` must be given once", info.name)));
            };
            if !info.kind.fits(slice) {
                let message = format!("binding `{}` is {:?}, which {slice:?} is not", info.name, info.kind);
                return Err(GpuError::validation(what(), message));
            }
            let limit = self.caps.max_binding_bytes;
            if matches!(info.kind, BindingKind::ReadOnly | BindingKind::ReadWrite) && slice.size > limit {
                let (what, bytes) = (slice.buffer.label().into(), slice.size);
                return Err(GpuError::BindingTooLarge { what, bytes, limit });
            }
            slices.push((*slice).clone());
        }
        let entries: Vec<wgpu::BindGroupEntry<'_>> = infos
            .iter()
            .zip(&slices)
            .map(|(info, slice)| wgpu::BindGroupEntry { binding: info.index, resource: resource(slice) })
            .collect();
        let desc = wgpu::BindGroupDescriptor { label: Some(&kernel.name), layout: &kernel.layout, entries: &entries };
        let group = self.scoped(&what(), 0, || self.device.create_bind_group(&desc))?;
        Ok(Arc::new(Bound { kernel: kernel.clone(), slices, group }))
    }
}

impl BindingKind {
    /// Texels are bound as texels, all else as buffers.
    fn fits(self, slice: &BufferSlice) -> bool {
        match self {
            BindingKind::Texels(format) => slice.buffer.texels().is_some_and(|t| t.is_read_as(format)),
            BindingKind::WrittenTexels(format) => {
                slice.buffer.texels().is_some_and(|t| t.is_line && t.is_read_as(format))
            }
            _ => slice.buffer.texels().is_none(),
        }
    }
}

fn resource(slice: &BufferSlice) -> wgpu::BindingResource<'_> {
    match slice.buffer.texels() {
        Some(texels) => wgpu::BindingResource::TextureView(&texels.view),
        None => wgpu::BindingResource::Buffer(wgpu::BufferBinding {
            buffer: slice.buffer.raw(),
            offset: slice.offset,
            size: std::num::NonZeroU64::new(slice.size),
        }),
    }
}

fn layout_entry(info: &BindingInfo) -> wgpu::BindGroupLayoutEntry {
    let buffer = |ty| wgpu::BindingType::Buffer {
        ty,
        has_dynamic_offset: false,
        min_binding_size: std::num::NonZeroU64::new(info.min_bytes),
    };
    let texels = |access, format| wgpu::BindingType::StorageTexture {
        access,
        format,
        view_dimension: wgpu::TextureViewDimension::D2,
    };
    let ty = match info.kind {
        BindingKind::Uniform => buffer(wgpu::BufferBindingType::Uniform),
        BindingKind::ReadOnly => buffer(wgpu::BufferBindingType::Storage { read_only: true }),
        BindingKind::ReadWrite => buffer(wgpu::BufferBindingType::Storage { read_only: false }),
        BindingKind::Texels(format) => texels(wgpu::StorageTextureAccess::ReadOnly, format),
        BindingKind::WrittenTexels(format) => texels(wgpu::StorageTextureAccess::WriteOnly, format),
    };
    wgpu::BindGroupLayoutEntry { binding: info.index, visibility: wgpu::ShaderStages::COMPUTE, ty, count: None }
}
