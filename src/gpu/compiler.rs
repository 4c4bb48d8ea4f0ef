//! Pipelines made on all cores while the caller goes on, and kept in a file between runs where the driver can.
//!
//! Making a pipeline is queued when its kernel is asked for, and waited for where it is used first. Threads live while there
//! is something to make. Who waits makes pipelines, too, so that one core is enough.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;

use super::device::{Faults, scoped};
use super::error::GpuError;
use super::shader::Stitched;
use xxhash_rust::xxh3::xxh3_128;

/// Below this a driver's cache holds its header only.
const SMALLEST_CACHE: usize = 1 << 10;
/// A file that grew beyond this holds what nobody asks for any more: it is begun anew.
const LARGEST_CACHE: u64 = 64 << 20;
/// In front of a file's content: its XXH3 hash.
const HASH_BYTES: usize = 16;

type Job = Box<dyn FnOnce() + Send>;

/// A pipeline that is being made; clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Pending(Arc<OnceLock<Result<wgpu::ComputePipeline, GpuError>>>);

/// What making a pipeline takes.
#[derive(Clone)]
pub(super) struct Maker {
    pub device: wgpu::Device,
    pub faults: Arc<Faults>,
    pub checked_shaders: bool,
    pub cache: Option<wgpu::PipelineCache>,
}

/// The queue of a device.
#[derive(Default)]
pub(super) struct Compiler {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    /// A pipeline was made.
    made: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// Queued and not finished.
    num_open: usize,
    num_queued: usize, // since all was made the last time
    num_threads: usize,
}

/// Where a driver keeps what it compiled, and what was there at the start.
#[derive(Debug)]
pub(super) struct CacheFile {
    path: PathBuf,
    hash: u128,
}

impl Pending {
    pub fn made(&self) -> Option<&wgpu::ComputePipeline> {
        self.0.get().and_then(|made| made.as_ref().ok())
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Counters and jobs are whole between any two statements that hold the lock.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a job and does it; false where there is none.
    fn do_one(&self) -> bool {
        let Some(job) = self.lock().jobs.pop_front() else { return false };
        job();
        self.lock().num_open -= 1;
        self.made.notify_all();
        true
    }
}

impl Compiler {
    /// Queues the making of a pipeline.
    pub fn start(&self, maker: Maker, what: String, stitched: Stitched, layout: wgpu::BindGroupLayout) -> Pending {
        let pending = Pending::default();
        let result = pending.0.clone();
        let job: Job = Box::new(move || {
            let make = || maker.pipeline(&what, &stitched, &layout);
            let made = std::panic::catch_unwind(std::panic::AssertUnwindSafe(make));
            let made = made.unwrap_or_else(|_| Err(GpuError::validation(&what, "the compiler panicked")));
            // It is set here only.
            let _ = result.set(made);
        });
        let mut queue = self.shared.lock();
        queue.num_queued = if queue.num_open == 0 { 1 } else { queue.num_queued + 1 };
        queue.num_open += 1;
        queue.jobs.push_back(job);
        // The caller is a thread, too.
        let most = std::thread::available_parallelism().map_or(1, usize::from) - 1;
        if queue.num_threads < most {
            queue.num_threads += 1;
            drop(queue);
            self.add_thread();
        }
        pending
    }

    fn add_thread(&self) {
        let shared = self.shared.clone();
        let thread = std::thread::Builder::new().name("kvasir-compile".into()).spawn(move || {
            loop {
                while shared.do_one() {}
                let mut queue = shared.lock();
                if queue.jobs.is_empty() {
                    queue.num_threads -= 1;
                    return;
                }
            }
        });
        match thread {
            Ok(thread) => {
                let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
                threads.retain(|thread| !thread.is_finished());
                threads.push(thread);
            }
            // Who waits makes them.
            Err(_) => self.shared.lock().num_threads -= 1,
        }
    }

    /// Makes pipelines until this one is made.
    pub fn wait<'p>(&self, pending: &'p Pending) -> Result<&'p wgpu::ComputePipeline, GpuError> {
        loop {
            if let Some(made) = pending.0.get() {
                return made.as_ref().map_err(Clone::clone);
            }
            self.advance();
        }
    }

    /// Makes all that is queued. `progress` hears how many of how many are made and may end it by returning false, which
    /// leaves the rest queued. True when all are made.
    pub fn finish(&self, progress: &mut dyn FnMut(u64, u64) -> bool) -> bool {
        loop {
            let (open, queued) = {
                let queue = self.shared.lock();
                (queue.num_open as u64, queue.num_queued as u64)
            };
            if !progress(queued - open, queued) {
                return false;
            }
            if open == 0 {
                return true;
            }
            self.advance();
        }
    }

    /// Makes one, or waits until another thread has made one.
    fn advance(&self) {
        if self.shared.do_one() {
            return;
        }
        let queue = self.shared.lock();
        if queue.num_open > 0 && queue.jobs.is_empty() {
            // A signal that came before this is missed for so long at most.
            let moment = std::time::Duration::from_millis(20);
            drop(self.shared.made.wait_timeout(queue, moment).unwrap_or_else(PoisonError::into_inner));
        }
    }
}

impl Drop for Compiler {
    fn drop(&mut self) {
        let dropped: Vec<Job> = self.shared.lock().jobs.drain(..).collect();
        drop(dropped);
        let threads = self.threads.get_mut().unwrap_or_else(PoisonError::into_inner);
        for thread in threads.drain(..) {
            // Its panics were caught and told.
            let _ = thread.join();
        }
    }
}

impl Maker {
    fn pipeline(
        &self,
        label: &str,
        stitched: &Stitched,
        layout: &wgpu::BindGroupLayout,
    ) -> Result<wgpu::ComputePipeline, GpuError> {
        scoped((&self.device, &self.faults), label, 0, || {
            let source = wgpu::ShaderSource::Wgsl(stitched.text.as_str().into());
            let desc = wgpu::ShaderModuleDescriptor { label: Some(label), source };
            let module = if self.checked_shaders {
                self.device.create_shader_module(desc)
            } else {
                // SAFETY: all shader text is ours, embedded in the program; every kernel is tested with checks on over edge
                // shapes, guards its indices against the parameters it is given, and has no unbounded loop.
                unsafe { self.device.create_shader_module_trusted(desc, wgpu::ShaderRuntimeChecks::unchecked()) }
            };
            let pipeline_layout = self.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
                label: Some(label),
                bind_group_layouts: &[Some(layout)],
                immediate_size: 0,
            });
            self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(label),
                layout: Some(&pipeline_layout),
                module: &module,
                entry_point: None,
                compilation_options: wgpu::PipelineCompilationOptions {
                    constants: &[],
                    zero_initialize_workgroup_memory: false,
                },
                cache: self.cache.as_ref(),
            })
        })
    }
}

impl CacheFile {
    /// Opens the cache of a device in this folder, with what an earlier run left there. A file that is not whole is not used.
    pub fn open(device: &wgpu::Device, dir: &Path, name: &str) -> (CacheFile, wgpu::PipelineCache) {
        let path = dir.join(name);
        let is_large = std::fs::metadata(&path).is_ok_and(|file| file.len() > LARGEST_CACHE);
        // A file that is not there, or cannot be read, is an empty cache.
        let bytes = if is_large { None } else { std::fs::read(&path).ok() };
        let data = bytes.as_deref().and_then(content);
        if bytes.is_some() && data.is_none() {
            tracing::warn!("{} is damaged: pipelines are made anew", path.display());
        }
        let desc = wgpu::PipelineCacheDescriptor { label: Some("pipelines"), data, fallback: true };
        // SAFETY: the bytes are those that a driver gave an earlier run, as their hash tells, in the user's own folder; the
        // driver looks at the header, and falls back to an empty cache where they are another's.
        let cache = unsafe { device.create_pipeline_cache(&desc) };
        (CacheFile { path, hash: data.map_or(0, xxh3_128) }, cache)
    }

    /// Writes what the cache holds by now, where that is something new.
    pub fn save(&mut self, cache: &wgpu::PipelineCache) {
        let Some(data) = cache.get_data().filter(|data| data.len() >= SMALLEST_CACHE) else { return };
        let hash = xxh3_128(&data);
        if hash == self.hash {
            return;
        }
        match write(&self.path, hash, &data) {
            Ok(()) => self.hash = hash,
            Err(error) => tracing::warn!("pipelines are not kept in {}: {error}", self.path.display()),
        }
    }
}

/// What follows the hash, if it has that hash.
fn content(bytes: &[u8]) -> Option<&[u8]> {
    let (hash, data) = bytes.split_first_chunk::<HASH_BYTES>()?;
    (u128::from_le_bytes(*hash) == xxh3_128(data)).then_some(data)
}

/// Under its name only when it is whole.
fn write(path: &Path, hash: u128, data: &[u8]) -> std::io::Result<()> {
    let dir = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(dir)?;
    let partial = path.with_extension(format!("{}.partial", std::process::id()));
    let bytes = [&hash.to_le_bytes()[..], data].concat();
    let written = std::fs::write(&partial, bytes).and_then(|()| std::fs::rename(&partial, path));
    if written.is_err() {
        // The first error is the one to tell.
        let _ = std::fs::remove_file(&partial);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_not_whole_is_told_from_one_that_is() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("deeper/cache");
        let data = [7; 3000];
        write(&path, xxh3_128(&data), &data).expect("written");
        let mut bytes = std::fs::read(&path).expect("it is there");
        assert_eq!(content(&bytes), Some(&data[..]));
        for cut in [0, 15, 16, 100, bytes.len() - 1] {
            assert_eq!(content(&bytes[..cut]), None, "{cut}");
        }
        bytes[50] ^= 1;
        assert_eq!(content(&bytes), None);
        let names: Vec<_> = std::fs::read_dir(path.parent().expect("a folder")).expect("a folder").collect();
        assert_eq!(names.len(), 1, "{names:?}");
    }
}
