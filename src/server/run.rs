//! The process's side: bind, serve on a runtime of its own, drain, end.
//!
//! Guarantees: a port that is taken is an error before any model is loaded; when asked to stop, health turns 503 at
//! once, new work is refused, what runs finishes within the time limit, and a second request to stop ends it at once.

use super::app::{App, AppState};
use super::fleet::Fleet;
use super::kv_events;
use super::options::ServerOptions;
use super::routes;
use super::tls::{self, TlsListener};
use crate::engine::EngineHandle;
use axum::serve::{Listener, ListenerExt};
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// How often the wish to stop is looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(25);
/// How often the engine's progress is looked at.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);
/// Connections that are still open after the drain get so long to close.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);

/// Why the server could not run.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("{address} is in use by another program")]
    Busy { address: String },
    #[error("cannot listen on {address}: {fault}")]
    Bind { address: String, fault: std::io::Error },
    #[error("TLS: {}: {fault}", path.display())]
    Tls { path: std::path::PathBuf, fault: String },
    #[error("the server cannot run: {0}")]
    Runtime(std::io::Error),
    #[error("--kv-events-endpoint cannot be used: this program was built without kv-events")]
    NoKvEvents,
}

/// A bound server, not yet serving.
pub struct Server {
    app: App,
    socket: Socket,
    kv_events: Option<kv_events::Sockets>,
    tls: Option<tokio_rustls::TlsAcceptor>,
}

enum Socket {
    Tcp(TcpListener),
    #[cfg(unix)]
    Unix(std::os::unix::net::UnixListener, std::path::PathBuf),
}

impl Server {
    /// Binds the address of the options, for one model that stays loaded. Connections wait until [`Server::run`].
    pub fn bind(engine: EngineHandle, options: ServerOptions) -> Result<Server, ServeError> {
        Self::bind_fleet(Fleet::of_one(engine, options.served_names.clone()), options)
    }

    /// As [`Self::bind`], for models that come and go.
    pub fn bind_fleet(fleet: Fleet, options: ServerOptions) -> Result<Server, ServeError> {
        let tls = options.tls.as_ref().map(tls::acceptor).transpose()?;
        let socket = match &options.uds {
            Some(path) => bind_unix(path)?,
            None => Socket::Tcp(bind_tcp(&options.host, options.port)?),
        };
        let kv_events = options.kv_events.as_ref().map(kv_events::bind).transpose()?;
        Ok(Server { app: AppState::new(fleet, options), socket, kv_events, tls })
    }

    /// Where changes of the prefix caches are published, and where past ones are asked for.
    pub fn kv_event_addrs(&self) -> (Option<SocketAddr>, Option<SocketAddr>) {
        let sockets = self.kv_events.as_ref();
        (sockets.and_then(kv_events::Sockets::local_addr), sockets.and_then(kv_events::Sockets::replay_addr))
    }

    /// Where it listens; `None` on a Unix socket.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        match &self.socket {
            Socket::Tcp(listener) => listener.local_addr().ok(),
            #[cfg(unix)]
            Socket::Unix(..) => None,
        }
    }

    /// Serves until `num_stops` (how often the process was asked to stop) is 1 or more and the drain is over.
    pub fn run(self, num_stops: impl Fn() -> u32 + Send + Sync + 'static) -> Result<(), ServeError> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(self.app.options.num_threads.max(1))
            .thread_name("http")
            .enable_all()
            .build()
            .map_err(ServeError::Runtime)?;
        let replica = match (self.local_addr(), &self.app.options.uds) {
            (Some(address), _) => address.to_string(),
            (None, path) => path.clone().unwrap_or_default().display().to_string(),
        };
        let Server { app, socket, kv_events, tls } = self;
        let result = runtime.block_on(async {
            if let Some(sockets) = kv_events {
                sockets.start(&app, &replica).await?;
            }
            match socket {
                Socket::Tcp(listener) => {
                    listener.set_nonblocking(true).map_err(ServeError::Runtime)?;
                    let listener = tokio::net::TcpListener::from_std(listener).map_err(ServeError::Runtime)?;
                    if let Some(acceptor) = tls {
                        return serve(app, TlsListener::new(listener, acceptor), Arc::new(num_stops)).await;
                    }
                    // Small chunks go out at once.
                    let listener = listener.tap_io(|stream| _ = stream.set_nodelay(true));
                    serve(app, listener, Arc::new(num_stops)).await
                }
                #[cfg(unix)]
                Socket::Unix(listener, path) => {
                    listener.set_nonblocking(true).map_err(ServeError::Runtime)?;
                    let listener = tokio::net::UnixListener::from_std(listener).map_err(ServeError::Runtime)?;
                    let result = serve(app, listener, Arc::new(num_stops)).await;
                    // Whoever comes next replaces a socket that is left behind.
                    let _ = std::fs::remove_file(path);
                    result
                }
            }
        });
        // What still runs is dropped, which aborts its requests.
        runtime.shutdown_background();
        result
    }
}

async fn serve<L>(app: App, listener: L, num_stops: Arc<dyn Fn() -> u32 + Send + Sync>) -> Result<(), ServeError>
where
    L: Listener,
    L::Addr: std::fmt::Debug,
{
    tokio::spawn(watch(app.clone()));
    if let Some(tracer) = &app.tracer {
        tracer.start();
    }
    let (drained, is_drained) = tokio::sync::oneshot::channel::<()>();
    let mut server = tokio::spawn({
        let service = routes::router(app.clone());
        let stop = async { _ = is_drained.await };
        std::future::IntoFuture::into_future(axum::serve(listener, service).with_graceful_shutdown(stop))
    });
    let fault = |result: Result<std::io::Result<()>, tokio::task::JoinError>| match result {
        Ok(result) => result.map_err(ServeError::Runtime),
        Err(error) => Err(ServeError::Runtime(std::io::Error::other(error))),
    };
    tokio::select! {
        ended = &mut server => return fault(ended),
        () = drain(&app, &*num_stops) => {}
    }
    // What has had its time is told so.
    app.end_all();
    let ended = Instant::now() + CLOSE_TIMEOUT;
    while app.num_under_way() > 0 && Instant::now() < ended {
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    if let Some(tracer) = &app.tracer {
        tracer.flush().await;
    }
    // Dropped only here; the server then takes no further connection and closes idle ones.
    drop(drained);
    match tokio::time::timeout(CLOSE_TIMEOUT, &mut server).await {
        Ok(ended) => fault(ended),
        Err(_) => Ok(()),
    }
}

/// Returns when the server was asked to stop and what ran has finished, or has had its time.
async fn drain(app: &App, num_stops: &(dyn Fn() -> u32 + Send + Sync)) {
    while num_stops() == 0 {
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    app.drain();
    let deadline = Instant::now() + app.options.shutdown_timeout;
    tracing::info!("stopping: {} requests are under way", app.num_under_way());
    while app.num_under_way() > 0 && num_stops() < 2 && Instant::now() < deadline {
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

async fn watch(app: App) {
    loop {
        app.watch_progress();
        app.fleet.unload_idle().await;
        tokio::time::sleep(WATCH_INTERVAL).await;
    }
}

/// A listener on the first address of a host that can be had.
pub(super) fn bind_tcp(host: &str, port: u16) -> Result<TcpListener, ServeError> {
    let address = format!("{host}:{port}");
    let fault = |fault: std::io::Error| match fault.kind() {
        std::io::ErrorKind::AddrInUse => ServeError::Busy { address: address.clone() },
        _ => ServeError::Bind { address: address.clone(), fault },
    };
    let addresses: Vec<SocketAddr> = (host, port).to_socket_addrs().map_err(fault)?.collect();
    TcpListener::bind(addresses.as_slice()).map_err(fault)
}

#[cfg(unix)]
fn bind_unix(path: &Path) -> Result<Socket, ServeError> {
    use std::os::unix::net::{UnixListener, UnixStream};
    let address = path.display().to_string();
    let fault = |fault: std::io::Error| ServeError::Bind { address: address.clone(), fault };
    // A socket that nobody answers on was left behind by a process that is gone.
    if path.exists() && UnixStream::connect(path).is_ok() {
        return Err(ServeError::Busy { address });
    }
    if std::fs::symlink_metadata(path).is_ok_and(|found| is_socket(&found)) {
        std::fs::remove_file(path).map_err(fault)?;
    }
    Ok(Socket::Unix(UnixListener::bind(path).map_err(fault)?, path.to_path_buf()))
}

#[cfg(unix)]
fn is_socket(found: &std::fs::Metadata) -> bool {
    std::os::unix::fs::FileTypeExt::is_socket(&found.file_type())
}

#[cfg(not(unix))]
fn bind_unix(path: &Path) -> Result<Socket, ServeError> {
    let fault = std::io::Error::other("Unix sockets are not there on this system");
    Err(ServeError::Bind { address: path.display().to_string(), fault })
}
