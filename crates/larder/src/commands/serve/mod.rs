//! `larder serve`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use larder_core::format_bytes;
use larder_os::memory;
use larder_runtime::ContextSize;
use larder_runtime::plan::reserve_bytes;
use larder_serve::{ApiKey, ModelSource, OnDemandModels, ServerOptions, SessionDisk, UpstreamOptions};
use larder_store::read_small;
use tracing_subscriber::filter::LevelFilter;

use super::signal;
use crate::cli::serve::{LogLevel, ServeArgs};

mod address;
mod catalogue;
mod engine;
mod on_demand;
mod opener;

pub use catalogue::models_of;
use on_demand::OnDemandLoader;
use opener::ModelOpener;

/// Largest file of keys, certificates, and largest chat template.
const FILE_BYTES_MAX: u64 = 4 << 20;
/// Sequences in the prefix cache without --sessions, active ones included; they share the memory of --parallel.
const SLOTS: usize = 32;

/// Serves HTTP until a signal ends it.
pub fn run(args: ServeArgs) -> Result<()> {
    if args.engine.settings.options.context == ContextSize::Tokens(1) {
        bail!("--context must be at least 2: one token of prompt and one to generate");
    }
    if args.api_key.as_deref().is_some_and(str::is_empty) {
        bail!("the API key is empty; set --api-key (or LARDER_API_KEY) to some text, or leave it out");
    }
    let api_keys = api_keys(&args)?;
    start_log(args.log_level);
    // The port is bound before the model is loaded, so that a port in use is reported at once.
    let (listener, address) = args.address.listen()?;
    let (is_local, with_tls) = (address.is_local_port(), address.with_tls());
    let options = ServerOptions { api_keys, is_local, with_tls, ..options(&args) };
    let named = models_of(&args.model)?;
    let several = named.len() > 1;
    let (names, paths): (Vec<String>, Vec<PathBuf>) = named.into_iter().unzip();
    let opener = Arc::new(ModelOpener { args, server: options.clone() });
    if address.is_public() && options.api_keys.is_empty() {
        eprintln!("warning: {address} is reachable from other machines without a key; set --api-key to require one");
    }
    let (source, serving) = if several {
        on_demand(opener, names, paths)?
    } else {
        let (model, engine) = opener.open(&paths[0])?.start(opener.names(&names[0]))?;
        let serving = model.name.clone();
        (ModelSource::Loaded(Box::new(model), engine), serving)
    };
    let serving = format!("serving {serving} on {address}");
    Ok(larder_serve::serve(listener, options, source, signal, || eprintln!("{serving}"))?)
}

/// The context of a model under these flags by the memory plan, and the model's own.
pub fn contexts(args: ServeArgs, path: &Path) -> Result<[usize; 2]> {
    let server = options(&args);
    Arc::new(ModelOpener { args, server }).open(path)?.contexts()
}

/// Several models, which are loaded for requests, and what is printed of them.
fn on_demand(opener: Arc<ModelOpener>, names: Vec<String>, paths: Vec<PathBuf>) -> Result<(ModelSource, String)> {
    opener.check_several()?;
    let args = &opener.args;
    let available = memory::available();
    let memory_bytes = match (args.models_mem, available) {
        (Some(size), _) => size.0,
        (None, Some(available)) => available.saturating_sub(reserve_bytes(available)),
        (None, None) => bail!("the available memory is not known here; say with --models-mem how much models may take"),
    };
    let serving = format!("{} models ({}) in {} of memory", names.len(), names.join(", "), format_bytes(memory_bytes));
    let unload_after = Some(args.unload_after).filter(|seconds| *seconds > 0).map(Duration::from_secs);
    let process_bytes = memory::current().unwrap_or_default();
    let loader =
        Box::new(OnDemandLoader { opener: opener.clone(), names: names.clone(), paths, memory_bytes, process_bytes });
    Ok((ModelSource::OnDemand(OnDemandModels { names, loader, memory_bytes, unload_after }), serving))
}

fn options(args: &ServeArgs) -> ServerOptions {
    ServerOptions {
        parallel: args.parallel,
        sessions: args.sessions.unwrap_or(args.parallel).max(args.parallel),
        slots: args.sessions.unwrap_or(SLOTS).max(args.parallel),
        step_time: Duration::from_secs_f64(args.step_time),
        session_disk: args.session_dir.clone().map(|folder| SessionDisk { folder, limit_bytes: args.session_disk.0 }),
        context_full: args.context_full,
        queue: args.queue,
        timeout: Duration::from_secs(args.timeout),
        client_timeout: Duration::from_secs(args.client_timeout),
        body_bytes: usize::try_from(args.max_body.0).unwrap_or(usize::MAX),
        api_keys: vec![],
        process_bytes: memory::current,
        cors: args.cors.clone(),
        strict_model: args.strict_model,
        keep_client_lines: args.keep_client_lines,
        lock_routing: args.lock_routing,
        is_local: false,
        with_tls: false,
        upstream: args.upstream.clone().map(|address| UpstreamOptions { address, key: args.upstream_key.clone() }),
        image_urls: args.image_urls.clone(),
    }
}

fn start_log(level: LogLevel) {
    let level = match level {
        LogLevel::Off => return,
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Info => LevelFilter::INFO,
    };
    let log = tracing_subscriber::fmt().with_max_level(level).with_ansi(false).with_target(false);
    log.with_writer(std::io::stderr).init();
}

/// The key of `--api-key`, which is an administrator's, and those of `--api-key-file`.
fn api_keys(args: &ServeArgs) -> Result<Vec<ApiKey>> {
    let mut keys: Vec<ApiKey> = args.api_key.iter().map(|key| ApiKey { key: key.clone(), is_admin: true }).collect();
    let Some(path) = &args.api_key_file else { return Ok(keys) };
    let Some(bytes) = read_small(path, FILE_BYTES_MAX)? else { bail!("{}: not found", path.display()) };
    let text = std::str::from_utf8(&bytes).with_context(|| format!("{}: is not UTF-8", path.display()))?;
    for (i, line) in text.lines().enumerate() {
        let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
        let Some(key) = words.next() else { continue };
        let is_admin = match (words.next(), words.next()) {
            (None | Some("user"), None) => false,
            (Some("admin"), None) => true,
            _ => bail!("{}:{}: expected a key, and admin or user or nothing behind it", path.display(), i + 1),
        };
        keys.push(ApiKey { key: key.to_owned(), is_admin });
    }
    if keys.is_empty() {
        bail!("{}: has no key; write one per line, or leave out --api-key-file", path.display());
    }
    Ok(keys)
}
