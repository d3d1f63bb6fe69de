//! A set of experts of one model, and its form on the wire.

use larder_core::{ExpertId, Geometry, LayerIdx};

use crate::workers::wire;

/// A set of experts of one model.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExpertSet {
    /// For each decoder layer, whether each expert is in the set; empty for layers without experts.
    layers: Vec<Vec<bool>>,
}

impl ExpertSet {
    /// The experts of the model for which `is_held` is true.
    pub fn from_fn(geometry: &Geometry, is_held: impl Fn(LayerIdx, ExpertId) -> bool) -> Self {
        let mut layers = vec![vec![]; geometry.layers];
        for layer in &geometry.moe_layers {
            layers[layer.index()] = (0..geometry.experts).map(|e| is_held(*layer, ExpertId(e as u16))).collect();
        }
        ExpertSet { layers }
    }

    /// A set without experts.
    pub fn empty(geometry: &Geometry) -> Self {
        ExpertSet::from_fn(geometry, |_, _| false)
    }

    /// A set from one list per decoder layer. The error names an expert that the model does not have.
    pub fn from_lists(lists: &[Vec<u16>], geometry: &Geometry) -> Result<Self, String> {
        if lists.len() > geometry.layers {
            return Err(format!("lists the experts of {} layers, but the model has {}", lists.len(), geometry.layers));
        }
        let mut held = ExpertSet::empty(geometry);
        for (layer, list) in lists.iter().enumerate() {
            list.iter().try_for_each(|expert| held.add(layer, usize::from(*expert)))?;
        }
        Ok(held)
    }

    /// A set from a worker's description. The error names an expert that the model does not have.
    pub fn from_wire(lists: &[wire::Held], geometry: &Geometry) -> Result<Self, String> {
        let mut held = ExpertSet::empty(geometry);
        for wire::Held { layer, experts } in lists {
            experts.iter().try_for_each(|expert| held.add(*layer as usize, *expert as usize))?;
        }
        Ok(held)
    }

    /// The set as a worker describes it.
    pub fn to_wire(&self) -> Vec<wire::Held> {
        let layers = self.layers.iter().enumerate().filter(|(_, experts)| experts.contains(&true));
        let list = |(layer, experts): (usize, &Vec<bool>)| {
            let experts = experts.iter().enumerate().filter(|(_, held)| **held).map(|(expert, _)| expert as u32);
            wire::Held { layer: layer as u32, experts: experts.collect() }
        };
        layers.map(list).collect()
    }

    /// Whether an expert is in the set; false for experts that the model does not have.
    pub fn contains(&self, layer: LayerIdx, expert: ExpertId) -> bool {
        self.layers.get(layer.index()).and_then(|experts| experts.get(expert.index())).is_some_and(|held| *held)
    }

    /// The experts, by layer and ascending.
    pub fn iter(&self) -> impl Iterator<Item = (LayerIdx, ExpertId)> {
        let of_layer = |(layer, experts): (usize, &Vec<bool>)| {
            let held: Vec<usize> = (0..experts.len()).filter(|e| experts[*e]).collect();
            held.into_iter().map(move |e| (LayerIdx(layer as u16), ExpertId(e as u16)))
        };
        self.layers.iter().enumerate().flat_map(of_layer)
    }

    /// Number of experts in the set.
    pub fn count(&self) -> usize {
        self.layers.iter().flatten().filter(|held| **held).count()
    }

    fn add(&mut self, layer: usize, expert: usize) -> Result<(), String> {
        let entry = self.layers.get_mut(layer).and_then(|experts| experts.get_mut(expert));
        let Some(entry) = entry else {
            return Err(format!("names expert {expert} of layer {layer}, which the model does not have"));
        };
        *entry = true;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workers::handshake::tests::handshake;

    #[test]
    fn lists_round_trip_and_unknown_experts_are_refused() {
        let geometry = handshake().geometry;
        let held = ExpertSet::from_lists(&[vec![], vec![0, 7, 3]], &geometry).unwrap();
        assert_eq!(held.count(), 3);
        assert!(held.contains(LayerIdx(1), ExpertId(7)) && !held.contains(LayerIdx(1), ExpertId(1)));
        assert!(!held.contains(LayerIdx(0), ExpertId(0)) && !held.contains(LayerIdx(9), ExpertId::NONE));
        assert_eq!(ExpertSet::from_wire(&held.to_wire(), &geometry).unwrap(), held);
        assert_eq!(held.iter().collect::<Vec<_>>(), [0, 3, 7].map(|e| (LayerIdx(1), ExpertId(e))));
        assert_eq!(ExpertSet::from_fn(&geometry, |_, expert| expert.0 > 1).count(), 6);
        let error = ExpertSet::from_lists(&[vec![1]], &geometry).unwrap_err();
        assert_eq!(error, "names expert 1 of layer 0, which the model does not have");
        assert!(ExpertSet::from_lists(&[vec![], vec![8]], &geometry).is_err());
        assert!(ExpertSet::from_lists(&[vec![], vec![], vec![]], &geometry).is_err());
        assert!(ExpertSet::from_wire(&[wire::Held { layer: u32::MAX, experts: vec![1] }], &geometry).is_err());
    }
}
