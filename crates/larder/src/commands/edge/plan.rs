//! `larder edge plan`.

use anyhow::{Result, bail};
use larder_core::ExpertActivations;
use larder_edge::placement::{Cost, Latency, ModelUsage, PlacementPlan, Topology, plan};
use serde_json::{Value, json};

use crate::cli::edge::EdgePlanArgs;
use crate::print;

/// Computes a placement and prints it with its estimated latency.
pub fn run(args: &EdgePlanArgs) -> Result<()> {
    let topology = Topology::read(&args.topology)?;
    let activations: Vec<ExpertActivations> =
        args.activations.iter().map(|path| ExpertActivations::read(path)).collect::<Result<_, _>>()?;
    if !args.share.is_empty() && args.share.len() != activations.len() {
        bail!(
            "--share gives {} numbers for {} files; give one per file, e.g. 3,1",
            args.share.len(),
            activations.len()
        );
    }
    let share = |at: usize| args.share.get(at).copied().unwrap_or(1.0);
    let asked: Vec<ModelUsage> =
        activations.iter().enumerate().map(|(at, activations)| ModelUsage { activations, share: share(at) }).collect();
    let (serving, wire) = (args.paths.into(), args.wire.into());
    let plan = plan(&topology, &asked, serving, wire, args.algorithm, args.seed)?;
    if let Some(path) = &args.out {
        plan.file.write(path)?;
    }
    if args.json {
        println!("{}", as_json(args, &plan));
        return Ok(());
    }
    print!("{}", print::table(&holders(&topology, &plan)));
    println!();
    print!("{}", print::table(&parts(&plan)));
    println!(
        "\n{} per token, {} of it network time; {} if the workers held nothing",
        time(plan.latency.total()),
        time(plan.latency.transmission()),
        time(plan.baseline.total())
    );
    if let Some(path) = &args.out {
        println!("{}: placement by {}, for the workers and for `larder run --edge`", path.display(), plan.placed_by);
    }
    Ok(())
}

/// How many experts a machine holds.
struct Holder {
    name: String,
    experts: usize,
    bytes: u64,
    storage: Option<u64>,
}

fn all_holders(topology: &Topology, plan: &PlacementPlan) -> Vec<Holder> {
    let library = &plan.problem.library;
    let local = &plan.problem.users[0].local;
    let own: Vec<usize> = (0..local.len()).filter(|expert| local[*expert]).collect();
    let bytes = |experts: &[usize]| experts.iter().map(|expert| library.bytes(*expert)).sum();
    let device =
        Holder { name: "device".into(), experts: own.len(), bytes: bytes(&own), storage: topology.device.storage };
    let server = |(n, name): (usize, &String)| {
        let held: Vec<usize> = plan.placement.experts_of(n).collect();
        let storage = Some(plan.problem.servers[n].storage);
        Holder { name: name.clone(), experts: held.len(), bytes: bytes(&held), storage }
    };
    let all: Vec<usize> = (0..library.experts()).collect();
    let cloud = Holder { name: plan.cloud.clone(), experts: all.len(), bytes: bytes(&all), storage: None };
    std::iter::once(device).chain(plan.servers.iter().enumerate().map(server)).chain([cloud]).collect()
}

fn holders(topology: &Topology, plan: &PlacementPlan) -> Vec<Vec<String>> {
    let head = ["holder", "experts", "bytes", "storage"].map(str::to_owned).to_vec();
    let row = |holder: Holder| {
        let storage = holder.storage.map_or("all".into(), print::bytes);
        vec![holder.name, holder.experts.to_string(), print::bytes(holder.bytes), storage]
    };
    std::iter::once(head).chain(all_holders(topology, plan).into_iter().map(row)).collect()
}

/// The places where experts are computed, the share of experts at each, and the time spent.
fn places(latency: &Latency) -> [(&'static str, Option<f64>, Cost); 5] {
    let total = latency.served.total().max(f64::MIN_POSITIVE);
    let served = |experts: f64| Some(experts / total);
    let (local, access) = (latency.local, latency.access);
    [
        ("local", served(latency.served.local), Cost { transmission: 0.0, compute: local }),
        ("access", None, Cost { transmission: access, compute: 0.0 }),
        ("associated", served(latency.served.associated), latency.associated),
        ("others", served(latency.served.others), latency.others),
        ("cloud", served(latency.served.cloud), latency.cloud),
    ]
}

fn parts(plan: &PlacementPlan) -> Vec<Vec<String>> {
    let named = |place: &str| match place {
        "local" => "the device".to_owned(),
        "access" => format!("link to {}", plan.associated),
        "associated" if plan.associated == plan.cloud => "associated worker".into(),
        "associated" => plan.associated.clone(),
        "others" => "other workers".into(),
        _ => format!("{} (holds all)", plan.cloud),
    };
    let head = ["per token", "experts", "network", "compute"].map(str::to_owned).to_vec();
    let row = |(place, served, cost): (&str, Option<f64>, Cost)| {
        let share = served.map_or(String::new(), |share| format!("{:.1} %", 100.0 * share));
        vec![named(place), share, time(cost.transmission), time(cost.compute)]
    };
    let there = |part: &(&str, Option<f64>, Cost)| {
        part.1.is_none_or(|share| share > 0.0) && (part.0 != "access" || part.2.total() > 0.0)
    };
    std::iter::once(head).chain(places(&plan.latency).into_iter().filter(there).map(row)).collect()
}

fn time(seconds: f64) -> String {
    match seconds {
        0.0 => "–".into(),
        s if s < 1e-3 => format!("{:.1} µs", s * 1e6),
        s if s < 1.0 => format!("{:.2} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}

fn as_json(args: &EdgePlanArgs, plan: &PlacementPlan) -> Value {
    let part = |(place, served, cost): (&str, Option<f64>, Cost)| {
        let part = json!({"experts": served, "transmission_s": cost.transmission, "compute_s": cost.compute});
        (place.to_owned(), part)
    };
    let library = &plan.problem.library;
    let of = |n: usize, name: &String| {
        let held = plan.placement.experts_of(n).count();
        json!({"name": name, "experts": held, "bytes": plan.placement.bytes(n, library), "storage": plan.problem.servers[n].storage})
    };
    let local = plan.problem.users[0].local.iter().filter(|held| **held).count();
    json!({
        "algorithm": args.algorithm.name,
        "placed_by": plan.placed_by,
        "models": library.models().iter().map(|m| m.name.as_str()).collect::<Vec<_>>(),
        "experts": library.experts(),
        "device": {"experts": local},
        "servers": plan.servers.iter().enumerate().map(|(n, name)| of(n, name)).collect::<Vec<_>>(),
        "associated": plan.associated,
        "cloud": plan.cloud,
        "latency_s": plan.latency.total(),
        "transmission_s": plan.latency.transmission(),
        "compute_s": plan.latency.compute(),
        "parts": places(&plan.latency).into_iter().map(part).collect::<serde_json::Map<_, _>>(),
        "latency_bare_s": plan.baseline.total(),
    })
}
