//! `larder edge worker`: serves experts over gRPC.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Error, Result, bail};
use larder_cache::{Cache, SlotSupply};
use larder_core::{CacheScope, size_down, size_up};
use larder_edge::{ExpertHost, ExpertSet, Handshake, TlsCredentials, UNUSED_TIMEOUT, WorkerOptions};
use larder_model::ComputeContext;
use larder_os::memory;
use larder_policy::eviction::{CacheShape, PolicyInputs};
use larder_runtime::edge::{self, LoadedPlacement};
use larder_runtime::{Slots, model_name};
use larder_store::reader::TouchPace;
use larder_store::{Source, Store};

use crate::cli::edge_worker::EdgeWorkerArgs;
use crate::commands::{listen, signal};
use crate::print;

/// Memory left for requests, answers and what the kernel allocates for the process.
const RESERVE_BYTES: u64 = 256 << 20;

/// A job wants few experts, so few have to pass through at once.
const PASS_THROUGH_SLOTS: usize = 1;

/// Serves a share of the experts until a signal ends it. Of the store only the shards of these experts are needed.
pub fn run(args: &EdgeWorkerArgs) -> Result<()> {
    let tls = tls(args)?;
    // The port is bound before the store is opened, so that a port in use is reported at once.
    let listener = listen(args.listen, "--listen")?;
    let address = listener.local_addr()?;
    let store = Arc::new(Store::open_partial(&args.model)?);
    let handshake = edge::handshake(&store, args.exact);
    let held = held(args, &store, &handshake)?;
    let shape = shape(args, &store, &held)?;
    let policies = args.eviction.make(&shape, &PolicyInputs::default())?;
    let Slots { slots, reader, reader_note, arena } = Slots::new(&store, &shape, PASS_THROUGH_SLOTS, &args.reader)?;
    arena.touch_ahead(TouchPace::Background);
    let geometry = &store.manifest().geometry;
    eprintln!("{reader_note}");
    let threads = args.threads.unwrap_or_else(larder_runtime::default_threads);
    let compute =
        ComputeContext::new(threads, false).context("compute threads cannot be started; try fewer --threads")?;
    let compute = Arc::new(ComputeContext { exact: args.exact, ..compute });
    let supply = SlotSupply { memory: slots, reader, shards: Box::new(store.clone()), threads: compute.clone() };
    let host = ExpertHost::new(Cache::new(geometry, &shape, policies, supply), compute);
    if tls.is_none() && !address.ip().is_loopback() {
        eprintln!(
            "warning: connections to {address} are neither encrypted nor authenticated; set --cert, --key and --client-ca to \
             encrypt them and to admit known clients only"
        );
    }
    let name = args.name.clone().unwrap_or_else(|| "worker".into());
    let scheme = if tls.is_some() { "https" } else { "http" };
    let ready =
        format!("serving {} experts of {} as {name} on {scheme}://{address}", held.count(), model_name(store.path()));
    let EdgeWorkerArgs { in_flight, connections, timeout, drain, .. } = *args;
    let (request_timeout, drain) = (Duration::from_secs(timeout.max(1)), Duration::from_secs(drain));
    let options =
        WorkerOptions { name, in_flight, connections, request_timeout, unused_timeout: UNUSED_TIMEOUT, drain, tls };
    let cut = larder_edge::serve(listener, options, handshake, held, host, first_signal(ready, drain))?;
    if cut > 0 {
        eprintln!("warning: {cut} requests took longer than --drain {} s and were cut off", drain.as_secs());
    }
    Ok(())
}

/// Prints `ready` and waits for the first signal; a second one then ends the process at once.
async fn first_signal(ready: String, drain: Duration) {
    let first = signal();
    // From here on a signal drains.
    eprintln!("{ready}");
    match first {
        Ok(first) => first.await,
        // Without a signal handler the process runs until it is killed.
        Err(_) => std::future::pending().await,
    }
    eprintln!(
        "shutting down: clients are sent elsewhere, for at most {} s; press Ctrl-C again to stop now",
        drain.as_secs()
    );
    if let Ok(second) = signal() {
        tokio::spawn(async {
            second.await;
            std::process::exit(130);
        });
    }
}

fn tls(args: &EdgeWorkerArgs) -> Result<Option<TlsCredentials>> {
    if args.cert.is_none() {
        return Ok(None);
    }
    let tls = TlsCredentials::read(args.client_ca.as_deref(), args.cert.as_deref(), args.key.as_deref());
    tls.map(Some).map_err(Error::msg)
}

fn held(args: &EdgeWorkerArgs, store: &Store, handshake: &Handshake) -> Result<ExpertSet> {
    let (Some(path), Some(name)) = (&args.placement, &args.name) else {
        return Ok(ExpertSet::from_fn(&handshake.geometry, |layer, expert| store.has(layer, expert)));
    };
    let model = args.known_as.clone().unwrap_or_else(|| model_name(store.path()));
    let held = LoadedPlacement::read(path)?.server_experts(name, &model, &handshake.geometry)?;
    if held.count() == 0 {
        bail!("{}: places no experts of {model} on {name}, so there is nothing to serve", path.display());
    }
    if let Some((layer, expert)) = held.iter().find(|(layer, expert)| !store.has(*layer, *expert)) {
        let (path, folder) = (path.display(), args.model.display());
        bail!("{path}: places {layer}, {expert} on {name}, but {folder} does not contain it");
    }
    Ok(held)
}

/// The shape of the cache: one pool for all experts of this worker, with a slot for each if they fit.
fn shape(args: &EdgeWorkerArgs, store: &Store, held: &ExpertSet) -> Result<CacheShape> {
    let manifest = store.manifest();
    let slot = manifest.slot_bytes() as u64;
    let available = memory::available().map(|bytes| bytes.saturating_sub(RESERVE_BYTES));
    let bytes_of = |slots: usize| (slots + PASS_THROUGH_SLOTS) as u64 * slot;
    let fit =
        |bytes: u64| usize::try_from(bytes / slot.max(1)).unwrap_or(usize::MAX).saturating_sub(PASS_THROUGH_SLOTS);
    let (requested, most) = (args.cache.map(|size| fit(size.0)), available.map_or(usize::MAX, fit));
    let slots = held.count().min(requested.unwrap_or(most));
    if slots == 0 {
        match args.cache {
            Some(size) => bail!(
                "--cache {} is too small: at least {} is needed (one expert, and another that passes through)",
                print::bytes(size.0),
                size_up(bytes_of(1))
            ),
            None => bail!("not even two experts of {} fit into the available memory", print::bytes(slot)),
        }
    }
    if slots > most {
        let need = print::bytes(bytes_of(slots));
        bail!("{need} of cached experts do not fit into memory; --cache {} fits", size_down(bytes_of(most)));
    }
    let total = held.count();
    eprintln!("plan: {} of cache for {slots} of {total} experts", print::bytes(bytes_of(slots)));
    Ok(CacheShape::new(&manifest.geometry, slots, CacheScope::Global))
}
