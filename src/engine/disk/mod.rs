//! The disk tier of the prefix cache: blocks as files that outlive the process.
//!
//! Guarantees: files are written and read by a thread of their own; a file appears under its name only when it is whole;
//! a file that is damaged, cut short, foreign or not what its name says is never read as content: it is removed, by name
//! in the log, and its content may be written again; the folder stays within its limit, also when several processes
//! write to it, the files used longest ago going first (as far as this process knows: of what another reads it learns at
//! the next start); what is to be forgotten is not read again, also what waits to be written; while nothing can be
//! written, that is said once and tried again now and then.
//! It does not decide what is worth keeping: the cache does.

mod file;
mod folder;
mod index;

pub use file::{FileFault, Format};

use crate::kv::{CachedContent, ContentId};
use folder::{Folder, Held, Stamp, hex};
use index::{Index, lock};
use std::cell::Cell;
use std::collections::{HashSet, VecDeque};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Jobs that wait for the thread at most.
const MAX_JOBS: usize = 4096;
/// Bytes that wait to be written at most; what comes beyond is not kept.
const MAX_QUEUED_BYTES: u64 = 256 << 20;
/// How often a thread without jobs looks at what others did to the folder.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Where files go, and how much they may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskConfig {
    pub dir: PathBuf,
    pub max_bytes: u64,
}

/// The folder cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the prefix cache's folder cannot be used: {message} ({})", path.display())]
pub struct FolderFault {
    pub path: PathBuf,
    pub message: String,
}

/// Contents that were asked for, as far as they could be read, in order.
#[derive(Debug)]
pub struct Fetched {
    /// The number under which they were asked for; [`Fetched::NEWS`] when nobody asked.
    pub ticket: u64,
    pub blocks: Vec<(CachedContent, Vec<u8>)>,
}

impl Fetched {
    /// Other files are there than before, or may be written again.
    pub const NEWS: u64 = u64::MAX;
}

/// What is to go.
#[derive(Clone, Debug)]
enum Forget {
    /// This content, and if so said those that follow it.
    One(ContentId, bool),
    AllBut(HashSet<ContentId>),
}

/// Things to forget, each after the first so many jobs.
type Forgets = Arc<Mutex<VecDeque<(u64, Forget)>>>;

enum Job {
    Write(CachedContent, Vec<u8>),
    Read {
        ticket: u64,
        ids: Vec<ContentId>,
    },
    Flush(SyncSender<()>),
    /// Something is to be forgotten.
    Look,
}

/// The files of one model in one format.
#[derive(Debug)]
pub struct DiskTier {
    index: Arc<Mutex<Index>>,
    /// `None` before [`DiskTier::start`].
    jobs: Option<SyncSender<Job>>,
    thread: Option<JoinHandle<()>>,
    queued_bytes: Arc<AtomicU64>,
    /// Jobs that the thread was given.
    num_jobs: Cell<u64>,
    forgets: Forgets,
    worker: Option<Worker>,
}

#[derive(Debug)]
struct Worker {
    folder: Folder,
    /// Of the folder, when the index was last made to agree with it.
    seen: Cell<Stamp>,
    format: Format,
    max_files: u64,
    index: Arc<Mutex<Index>>,
    queued_bytes: Arc<AtomicU64>,
    forgets: Forgets,
}

impl DiskTier {
    /// Looks at what the folder holds for this format; makes it where it is not there.
    pub fn open(config: &DiskConfig, format: Format) -> Result<DiskTier, FolderFault> {
        let path = config.dir.join(hex(&format.identity[..12])).join(format!("{}", format.block_size));
        let index = Arc::new(Mutex::new(Index::default()));
        let queued_bytes = Arc::new(AtomicU64::new(0));
        let forgets = Forgets::default();
        let worker = Worker {
            folder: Folder::new(path.clone(), format.file_bytes()),
            seen: Cell::default(),
            format,
            max_files: config.max_bytes / format.file_bytes(),
            index: index.clone(),
            queued_bytes: queued_bytes.clone(),
            forgets: forgets.clone(),
        };
        let made = std::fs::create_dir_all(&path).and_then(|()| worker.change(|_| Ok(())));
        made.map_err(|e| FolderFault { path, message: e.to_string() })?;
        let num_jobs = Cell::new(0);
        Ok(DiskTier { index, jobs: None, thread: None, queued_bytes, num_jobs, forgets, worker: Some(worker) })
    }

    /// Starts the thread; `deliver` gets what it reads.
    pub fn start(&mut self, deliver: impl Fn(Fetched) + Send + 'static) -> Result<(), FolderFault> {
        let Some(worker) = self.worker.take() else { return Ok(()) };
        let path = worker.folder.path().to_path_buf();
        let (jobs, queue) = sync_channel(MAX_JOBS);
        let thread = std::thread::Builder::new().name("prefix cache".into());
        let thread = thread.spawn(move || worker.run(&queue, &deliver));
        self.thread = Some(thread.map_err(|e| FolderFault { path, message: e.to_string() })?);
        self.jobs = Some(jobs);
        Ok(())
    }

    /// Files there are.
    pub fn len(&self) -> u64 {
        lock(&self.index).len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True when there is a file of this content.
    pub fn has(&self, id: &ContentId) -> bool {
        lock(&self.index).has(id)
    }

    /// True when this content was given to be kept before, or was there from the start.
    pub fn was_offered(&self, id: &ContentId) -> bool {
        lock(&self.index).was_offered(id)
    }

    /// Keeps a content, soon. False when too much waits to be written already, or nothing can be written at present.
    pub fn keep(&mut self, content: CachedContent, bytes: &[u8]) -> bool {
        if self.has(&content.id) {
            return true;
        }
        let len = bytes.len() as u64;
        let is_full = self.queued_bytes.load(Ordering::Relaxed) + len > MAX_QUEUED_BYTES;
        if is_full || lock(&self.index).is_failing(Instant::now()) {
            return false;
        }
        let id = content.id;
        self.queued_bytes.fetch_add(len, Ordering::Relaxed);
        lock(&self.index).offer(id);
        let is_taken = self.give(Job::Write(content, bytes.to_vec()));
        if !is_taken {
            self.queued_bytes.fetch_sub(len, Ordering::Relaxed);
            lock(&self.index).withdraw(&id);
        }
        is_taken
    }

    /// Asks for contents; they are delivered together. False when the thread cannot take the job.
    pub fn fetch(&self, ticket: u64, ids: Vec<ContentId>) -> bool {
        self.give(Job::Read { ticket, ids })
    }

    fn give(&self, job: Job) -> bool {
        let is_taken = self.jobs.as_ref().is_some_and(|jobs| jobs.try_send(job).is_ok());
        self.num_jobs.set(self.num_jobs.get() + u64::from(is_taken));
        is_taken
    }

    /// Removes a content, what was given to be kept before included, and if so said all that follow it.
    pub fn forget(&self, id: ContentId, with_followers: bool) {
        self.forget_after_jobs(Forget::One(id, with_followers));
    }

    /// Removes everything but these, what was given to be kept before included.
    pub fn forget_all_but(&self, kept: HashSet<ContentId>) {
        self.forget_after_jobs(Forget::AllBut(kept));
    }

    fn forget_after_jobs(&self, forget: Forget) {
        lock(&self.forgets).push_back((self.num_jobs.get(), forget));
        // A thread that is busy looks after each job.
        self.give(Job::Look);
    }

    /// Waits until all that was to be kept is written, for a while at most. False when it took longer.
    pub fn flush(&self, limit: Duration) -> bool {
        if self.jobs.is_none() {
            return true;
        }
        let (done, wait) = sync_channel(1);
        self.give(Job::Flush(done)) && wait.recv_timeout(limit).is_ok()
    }
}

impl Drop for DiskTier {
    fn drop(&mut self) {
        // Without a sender the thread ends after the jobs that wait; nobody waits for it.
        self.jobs = None;
        drop(self.thread.take());
    }
}

impl Worker {
    fn run(&self, queue: &Receiver<Job>, deliver: &(impl Fn(Fetched) + ?Sized)) {
        let mut num_done = 0;
        let mut told = lock(&self.index).len();
        loop {
            let job = match queue.recv_timeout(LOOK_INTERVAL) {
                Ok(job) => job,
                Err(RecvTimeoutError::Timeout) => {
                    self.look_around();
                    let may_write_again = lock(&self.index).is_to_be_tried(Instant::now());
                    let len = lock(&self.index).len();
                    if may_write_again || std::mem::replace(&mut told, len) != len {
                        deliver(Fetched { ticket: Fetched::NEWS, blocks: Vec::new() });
                    }
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => break,
            };
            self.forget_what_is_due(num_done);
            num_done += 1;
            match job {
                Job::Look => {}
                Job::Write(content, bytes) => {
                    self.queued_bytes.fetch_sub(bytes.len() as u64, Ordering::Relaxed);
                    self.keep(&content, &bytes);
                }
                Job::Read { ticket, ids } => deliver(Fetched { ticket, blocks: self.read_all(&ids) }),
                Job::Flush(done) => drop(done.try_send(())),
            }
        }
        self.forget_what_is_due(num_done);
    }

    /// Learns what others did to the folder.
    fn look_around(&self) {
        if self.folder.stamp() != self.seen.get()
            && let Err(error) = self.change(|_| Ok(()))
        {
            tracing::debug!("the prefix cache cannot look at {}: {error}", self.folder.path().display());
        }
    }

    /// Changes the folder: alone, and knowing what is there.
    fn change<T>(&self, what: impl FnOnce(&Held) -> std::io::Result<T>) -> std::io::Result<T> {
        let mut held = self.folder.lock()?;
        if held.stamp() != self.seen.get() {
            self.catch_up(&held)?;
        }
        let result = what(&held);
        self.seen.set(held.changed()?);
        result
    }

    fn catch_up(&self, held: &Held) -> std::io::Result<()> {
        let known = lock(&self.index).known();
        let listing = held.list(|id| known.contains(id))?;
        lock(&self.index).agree_with(&listing);
        if let Some(first) = listing.damaged.first() {
            let more = match listing.damaged.len() {
                1 => String::new(),
                n => format!(" and {} more", n - 1),
            };
            let path = self.folder.path_of(first);
            tracing::warn!("the prefix cache removed {}{more}: not of a block's size", path.display());
        }
        held.clean(&listing)
    }

    fn forget_what_is_due(&self, num_done: u64) {
        loop {
            let due = lock(&self.forgets).pop_front_if(|(after, _)| *after <= num_done);
            let Some((_, forget)) = due else { return };
            self.look_around();
            let doomed = self.doomed(&forget);
            let files: Vec<ContentId> = {
                let mut index = lock(&self.index);
                doomed.into_iter().filter(|id| index.withdraw(id)).collect()
            };
            if files.is_empty() {
                continue;
            }
            if let Err(error) = self.change(|held| files.iter().try_for_each(|id| held.remove(id))) {
                let path = self.folder.path().display();
                tracing::warn!("the prefix cache could not remove what was evicted from {path}: {error}");
            }
        }
    }

    /// What there is of the contents to be forgotten.
    fn doomed(&self, forget: &Forget) -> HashSet<ContentId> {
        let known = lock(&self.index).known_or_offered();
        match forget {
            Forget::AllBut(kept) => known.into_iter().filter(|id| !kept.contains(id)).collect(),
            Forget::One(id, false) => HashSet::from([*id]),
            Forget::One(id, true) => {
                let parent = |id: &ContentId| file::parent_of(&self.folder.path_of(id)).ok().flatten();
                let parents: Vec<(ContentId, ContentId)> =
                    known.iter().filter_map(|id| Some((*id, parent(id)?))).collect();
                let mut doomed = HashSet::from([*id]);
                let mut num_doomed = 0;
                while num_doomed < doomed.len() {
                    num_doomed = doomed.len();
                    let next: Vec<ContentId> =
                        parents.iter().filter(|(_, parent)| doomed.contains(parent)).map(|(id, _)| *id).collect();
                    doomed.extend(next);
                }
                doomed
            }
        }
    }

    /// Writes a content; while that cannot be done, its like are dropped, and may be offered again.
    fn keep(&self, content: &CachedContent, bytes: &[u8]) {
        let id = content.id;
        if lock(&self.index).is_failing(Instant::now()) {
            lock(&self.index).withdraw(&id);
            return;
        }
        match self.write(content, bytes) {
            Ok(()) => {
                if lock(&self.index).succeeds() {
                    tracing::info!("the prefix cache writes again");
                }
            }
            Err(error) => {
                lock(&self.index).withdraw(&id);
                if lock(&self.index).fails(Instant::now()) {
                    let path = self.folder.path_of(&id);
                    tracing::warn!("the prefix cache could not write {}: {error}", path.display());
                }
            }
        }
    }

    /// Makes room for a file, and writes it.
    fn write(&self, content: &CachedContent, bytes: &[u8]) -> std::io::Result<()> {
        if self.max_files == 0 || lock(&self.index).has(&content.id) {
            return Ok(());
        }
        self.change(|held| {
            if lock(&self.index).has(&content.id) {
                return Ok(());
            }
            loop {
                let oldest = lock(&self.index).oldest_beyond(self.max_files - 1);
                let Some(oldest) = oldest else { break };
                held.remove(&oldest)?;
                lock(&self.index).forget(&oldest);
            }
            held.write(&content.id, &file::encode(&self.format, content, bytes))?;
            lock(&self.index).touch(content.id);
            Ok(())
        })
    }

    /// The blocks of a prefix up to the first that cannot be had: what follows it is of no use, but looked at as well, so
    /// that all of a damaged prefix is written anew the next time it is computed.
    fn read_all(&self, ids: &[ContentId]) -> Vec<(CachedContent, Vec<u8>)> {
        let (mut blocks, mut is_whole) = (Vec::with_capacity(ids.len()), true);
        let mut refused = Vec::new();
        for id in ids {
            match self.read(id) {
                Ok(Some(block)) if is_whole => blocks.push(block),
                Ok(Some(_)) => {}
                Ok(None) => is_whole = false,
                Err(reason) => {
                    is_whole = false;
                    refused.push((*id, reason));
                }
            }
        }
        if let Some((first, reason)) = refused.first() {
            let more = match refused.len() {
                1 => String::new(),
                n => format!(" ({} more of the same prefix are damaged too)", n - 1),
            };
            let path = self.folder.path_of(first);
            match self.change(|held| refused.iter().try_for_each(|(id, _)| held.remove(id))) {
                Ok(()) => tracing::warn!("the prefix cache removed {}: {reason}{more}", path.display()),
                // The content, written again, takes its place.
                Err(error) => {
                    tracing::warn!("the prefix cache could not remove {}: {error}; {reason}{more}", path.display());
                }
            }
        }
        blocks
    }

    /// The block in a file; nothing where there is none any more. The content of a file that fails a check may be offered
    /// again.
    fn read(&self, id: &ContentId) -> Result<Option<(CachedContent, Vec<u8>)>, String> {
        // Forgotten since it was asked for.
        if !lock(&self.index).has(id) {
            return Ok(None);
        }
        let file = self.folder.read(id).map_err(|error| error.to_string());
        let found = file.and_then(|file| match file {
            Some(file) => file::decode(&self.format, id, &file).map(Some).map_err(|fault| fault.to_string()),
            None => Ok(None),
        });
        match found {
            Ok(Some(_)) => lock(&self.index).touch(*id),
            Ok(None) | Err(_) => drop(lock(&self.index).withdraw(id)),
        }
        found
    }
}

#[cfg(test)]
mod tests;
