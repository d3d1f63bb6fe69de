use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Error, Result, bail};
use larder_cache::Cache;
use larder_core::CacheScope;
use larder_edge::{ExpertHost, ExpertSet, Handshake, TlsCredentials, WorkerOptions};
use larder_model::ComputeContext;
use larder_policy::eviction::{CacheShape, PolicyInputs};
use larder_store::{Source, Store};

use crate::cli::edge_worker::EdgeWorkerArgs;
use crate::edge::{self, LoadedPlacement};
use crate::open::model_name;
use crate::slots::Slots;
use crate::{memory, print};

/// Left over for requests, answers and what the system does on the process's behalf.
const SPARE_BYTES: u64 = 256 << 20;

/// Holds a share of experts until told to end. Of the store nothing but the shards of these is needed.
pub fn run(args: &EdgeWorkerArgs) -> Result<()> {
    let tls = tls(args)?;
    // A port that is taken is known before anything is opened.
    let listener = TcpListener::bind(args.listen).with_context(|| format!("{} cannot be listened on", args.listen))?;
    let address = listener.local_addr()?;
    let store = Arc::new(Store::open_partial(&args.model)?);
    let handshake = edge::handshake(&store, args.exact);
    let held = held(args, &store, &handshake)?;
    let shape = shape(args, &store, &held)?;
    let policies = args.eviction.make(&shape, &PolicyInputs::default())?;
    let Slots { slots, reader, reader_note, .. } = Slots::new(&store, shape.total_slots(), &args.reader)?;
    let geometry = &store.manifest().geometry;
    let cache = Cache::new(geometry, &shape, policies, slots, reader, Box::new(store.clone()));
    eprintln!("{reader_note}");
    let threads = args.threads.unwrap_or_else(crate::cli::default_threads);
    let compute = ComputeContext::new(threads, false).context("threads to compute on cannot be had")?;
    let host = ExpertHost::new(cache, Arc::new(ComputeContext { exact: args.exact, ..compute }));
    if tls.is_none() && !address.ip().is_loopback() {
        eprintln!(
            "warning: everybody who reaches {address} can read what is asked and ask himself; --cert, --key and --client-ca would keep others out"
        );
    }
    let name = args.name.clone().unwrap_or_else(|| "worker".into());
    let scheme = if tls.is_some() { "https" } else { "http" };
    eprintln!("serving {} experts of {} as {name} on {scheme}://{address}", held.count(), model_name(store.path()));
    let EdgeWorkerArgs { in_flight, connections, timeout, .. } = *args;
    let options =
        WorkerOptions { name, in_flight, connections, request_timeout: Duration::from_secs(timeout.max(1)), tls };
    Ok(larder_edge::serve(listener, options, handshake, held, host)?)
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
        bail!("{}: gives {name} no experts of {model}, so there is nothing to serve", path.display());
    }
    if let Some((layer, expert)) = held.iter().find(|(layer, expert)| !store.has(*layer, *expert)) {
        let (path, folder) = (path.display(), args.model.display());
        bail!("{path}: places {layer}, {expert} on {name}, and {folder} does not have it");
    }
    Ok(held)
}

/// One pool for all of its experts, as many slots as there are experts if they fit.
fn shape(args: &EdgeWorkerArgs, store: &Store, held: &ExpertSet) -> Result<CacheShape> {
    let manifest = store.manifest();
    let slot = manifest.experts.data_bytes as u64;
    let room = memory::available().map(|bytes| bytes.saturating_sub(SPARE_BYTES));
    let fit = |bytes: u64| usize::try_from(bytes / slot.max(1)).unwrap_or(usize::MAX);
    let (asked, most) = (args.cache_mem.map(|size| fit(size.0)), room.map_or(usize::MAX, fit));
    let slots = held.count().min(asked.unwrap_or(most));
    if slots == 0 {
        bail!("not even one expert of {} fits into memory", print::bytes(slot));
    }
    if slots > most {
        let (need, fits) = (print::bytes(slots as u64 * slot), print::bytes(most as u64 * slot));
        bail!("{need} of slots do not fit; --cache-mem {fits} would", fits = fits.replace(' ', ""));
    }
    let total = held.count();
    eprintln!("plan: {} in slots for {slots} of {total} experts", print::bytes(slots as u64 * slot));
    Ok(CacheShape::new(&manifest.geometry, slots, CacheScope::Global))
}
